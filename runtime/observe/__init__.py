"""Events, log records, crash reports and status: values, formats and the observers' stream."""
