"""Tests of moeflow; the folders mirror the package."""
