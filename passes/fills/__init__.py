"""What ``strip_placeholder_fills`` does about a fill: one file for each use that a fill has."""
