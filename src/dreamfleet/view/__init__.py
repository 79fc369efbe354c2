"""Runs in a browser: `dreamfleet view`.

    reading     files of a run: no links, each byte once, thinned for a chart
    runs        the runs of a folder; one thread reads them for all pages
    guard       host, origin and token of every request
    app         the server
    frame       what pages share, and the base of a run's pages (`RunPage`)
    charts      any metric of any runs as curves
    actions     stop, resume, save, evaluate
    *_page      the pages

A run imports nothing from here, and does not know that it is viewed.
"""
