"""Runs in a browser: `dreamfleet view`.

    inside      files of a run, opened without following a link
    reading     files that grow, read once, thinned to what a screen can show
    runs        the runs of a folder, and what each is doing; one thread looks for all pages
    guard       who may ask: host, origin, token
    app         the server
    frame       what every page has around it
    *_page      one page each, with a function `add` that adds it to the server

Nothing here is imported by a run, and a run does not know that it is looked at.
"""
