"""TLS: certificates that fit, that do not, and that are replaced."""

import datetime
import shutil

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from attnd.v1 import server_pb2
from tests.support.server import attnd_server


def self_signed(folder, name, host="localhost"):
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / f"{name}.crt", folder / f"{name}.key"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_file, key_file


def call(address, *, trust=None, options=()):
    """Asks a new connection for the server's description."""
    # A pool of its own: channels to one address with the same arguments share a connection otherwise.
    options = [("grpc.use_local_subchannel_pool", 1), *options]
    if trust is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(trust.read_bytes()), options=options)
    with channel:
        data = channel.unary_unary("/attnd.v1.ServerService/GetServerInfo")(b"", timeout=10)
    return server_pb2.GetServerInfoResponse.FromString(data)


def as_localhost(server):
    return f"localhost:{server.address.split(':')[1]}"


def test_tls_serves_trusting_clients_and_refuses_others_clearly(tmp_path):
    cert, key = self_signed(tmp_path, "server")
    with attnd_server("--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert call(as_localhost(server), trust=cert).version
        other, _ = self_signed(tmp_path, "other")
        wrong_name = [("grpc.ssl_target_name_override", "elsewhere")]
        for attempt in ({}, {"trust": other}, {"trust": cert, "options": wrong_name}):
            with pytest.raises(grpc.RpcError) as caught:
                call(as_localhost(server), **attempt)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details()


def test_a_replaced_certificate_serves_new_connections(tmp_path):
    cert, key = self_signed(tmp_path, "server")
    with attnd_server("--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert call(as_localhost(server), trust=cert).version
        new_cert, new_key = self_signed(tmp_path, "new")
        shutil.copy(new_key, key)
        shutil.copy(new_cert, cert)
        assert call(as_localhost(server), trust=new_cert).version


def test_clients_need_a_certificate_where_an_authority_is_given(tmp_path):
    cert, key = self_signed(tmp_path, "server")
    options = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(cert)]
    with attnd_server(*options) as server:
        with pytest.raises(grpc.RpcError) as caught:
            call(as_localhost(server), trust=cert)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        credentials = grpc.ssl_channel_credentials(cert.read_bytes(), key.read_bytes(), cert.read_bytes())
        with grpc.secure_channel(as_localhost(server), credentials) as channel:
            channel.unary_unary("/attnd.v1.ServerService/GetServerInfo")(b"", timeout=10)


@pytest.mark.parametrize("options", [["--tls-cert", "nowhere.crt", "--tls-key", "nowhere.key"], ["--tls-key", "x.key"]])
def test_missing_tls_files_stop_the_start_with_a_clear_text(options):
    with pytest.raises(RuntimeError, match="TLS"), attnd_server(*options):
        pass
