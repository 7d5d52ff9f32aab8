"""The local web page of `broadsight app`: predict, look inside, compare. Needs the extra `demo`."""
