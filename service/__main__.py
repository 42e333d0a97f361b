"""Where the command `attnd` begins: what libraries read when they are imported is set before they are."""

from attnd.v1.polling import poll_in_waiting_threads


def main() -> None:
    """Runs the command line."""
    poll_in_waiting_threads()
    from attnd.service import cli  # noqa: PLC0415 - it imports gRPC

    cli.main()


if __name__ == "__main__":
    main()
