"""The supervisor's process. It sends workers functions of `chaos.fleet`, which therefore is not run
as `__main__`: workers could not import them."""

from dreamfleet.chaos.fleet import main

main()
