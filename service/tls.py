"""TLS credentials that follow their files."""

import grpc

from attnd.service.config import TlsConfig


class _Files:
    """The certificates on disk, as they were last read."""

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._contents = self._read()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Returns what was last read."""
        cert, key, client_ca = self._contents
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)

    def fresh_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns what is on disk now; None if it is what was last read, or cannot be read."""
        try:
            contents = self._read()
        except OSError:
            return None  # in the middle of a rotation: the certificates at hand go on serving
        if contents == self._contents:
            return None
        self._contents = contents
        return self.configuration()

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        client_ca = self._tls.client_ca_file
        return (
            self._tls.cert_file.read_bytes(),
            self._tls.key_file.read_bytes(),
            None if client_ca is None else client_ca.read_bytes(),
        )


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Returns credentials that use the files as they are when a connection begins.

    A certificate that is replaced serves new connections; those that exist keep theirs.
    """
    files = _Files(tls)
    return grpc.dynamic_ssl_server_credentials(
        files.configuration(),
        files.fresh_configuration,  # type: ignore[arg-type] # None is legal; the stubs do not know it
        require_client_authentication=tls.client_ca_file is not None,
    )
