"""The calls of a compiled model that a warmup makes again: taken from its graphs, kept in a file,
joined, and divided for planning."""

from compile_ext.manifest.graphs import collect, sites
from compile_ext.manifest.manifest import Manifest, ManifestSite, NotCovered

__all__ = ["Manifest", "ManifestSite", "NotCovered", "collect", "sites"]
