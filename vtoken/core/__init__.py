"""The part of vtoken that knows neither torch nor vLLM: tables of integers and pure functions on them."""
