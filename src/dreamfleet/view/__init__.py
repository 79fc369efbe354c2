"""Runs in a browser: `dreamfleet view`.

    reading     files of a run: no links, each byte once, thinned for a chart
    runs        the runs of a folder, which pages have read
    guard       host, origin and token of every request
    app         the server
    frame       what pages share: the head, refreshing, cards, tables, charts
    charts      any metric of any runs as curves
    actions     stop, resume, save, evaluate
    dream_host  the process that computes dreams
    *_page      the pages: a function builds one, and returns what refreshes it

A run imports nothing from here, and does not know that it is viewed.
"""
