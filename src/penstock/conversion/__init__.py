"""Recordings to datasets: plan from the index, read once, commit episode by episode."""
