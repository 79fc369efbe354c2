"""Runs in a browser: `dreamfleet view`.

    reading     files of a run: without following a link, read once, thinned for a screen
    runs        the runs of a folder, and what each is doing; one thread looks for all pages
    guard       who may ask: host, origin, token
    app         the server
    frame       what every page has around it, and what a page about a run is (`RunPage`)
    *_page      one page each

Nothing here is imported by a run, and a run does not know that it is looked at.
"""
