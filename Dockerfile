# The server as an image. CPU: `docker build -t attnd:cpu .`; TPU: `docker build --build-arg VARIANT=tpu -t attnd:tpu .`
# VARIANT names an extra of pyproject.toml and, in the running container, the platform that JAX must find.
ARG VARIANT=cpu

FROM python:3.13.9-slim-trixie AS build
ARG VARIANT
WORKDIR /src
RUN python -m venv /opt/attnd
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY kernels kernels
COPY service service
COPY client client
RUN /opt/attnd/bin/pip install --no-cache-dir --compile ".[${VARIANT}]"

FROM python:3.13.9-slim-trixie
ARG VARIANT
# A fixed id, so that orchestrators can check `runAsNonRoot`.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin attnd \
  && install --directory --owner=10001 --group=10001 /var/cache/attnd /var/lib/attnd
COPY --from=build /opt/attnd /opt/attnd
COPY deploy/healthcheck.py /opt/attnd/healthcheck.py
# JAX_PLATFORMS: a TPU image on a machine without a TPU must fail, not fall back to the CPU.
# The cache folders: compiled programs outlive the container if /var/cache/attnd is a volume.
ENV PATH=/opt/attnd/bin:$PATH \
  PYTHONUNBUFFERED=1 \
  JAX_PLATFORMS=${VARIANT} \
  JAX_COMPILATION_CACHE_DIR=/var/cache/attnd \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
  NUMBA_CACHE_DIR=/var/cache/attnd/numba
USER 10001:10001
EXPOSE 50051
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "/opt/attnd/healthcheck.py"]
# Inside a container loopback would reach nobody, so the wide address is said here, where it can be seen and overridden.
ENTRYPOINT ["attnd", "serve", "--host", "0.0.0.0"]
CMD ["--port", "50051"]
