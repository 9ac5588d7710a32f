"""The pager on a GPU: which row has which slot (resolve.cuh), how rows come (fetch.cuh), and how scans pass through (scan.cuh). README.md explains."""
