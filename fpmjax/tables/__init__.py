"""What was measured: table artifacts (Parquet + sidecar) and the cells they hold."""
