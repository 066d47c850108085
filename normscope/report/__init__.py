"""Pictures and pages: every figure is built here once; notebook, report and dashboard show the same."""
