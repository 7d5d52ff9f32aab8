"""From a float file to one in int8: calibration, what it loses, which layers stay in float."""
