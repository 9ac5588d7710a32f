"""Quality: what a candidate's answers differ in from a reference's, over HTTP or offline. `measure` and `stats` need no server."""
