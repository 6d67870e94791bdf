# syntax=docker/dockerfile:1
FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/kvgate
COPY requirements/base.txt requirements/base.txt
RUN /opt/kvgate/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/base.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY extproc extproc
# The build backend came with the lock, so this step fetches nothing.
RUN /opt/kvgate/bin/pip install --no-cache-dir --disable-pip-version-check --no-index --no-deps --no-build-isolation .

FROM python:3.13-slim
# /run/kvgate holds the ext_proc socket; a volume mounted there starts with this folder's owner.
RUN groupadd --system --gid 10001 kvgate \
 && useradd --system --uid 10001 --gid kvgate --no-create-home --shell /usr/sbin/nologin kvgate \
 && install -d -o kvgate -g kvgate /run/kvgate
COPY --from=build /opt/kvgate /opt/kvgate
ENV PATH=/opt/kvgate/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    KVGATE_HEALTH_URL=http://127.0.0.1:9902/livez
USER 10001:10001
EXPOSE 9902
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=2s --start-period=20s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(os.environ['KVGATE_HEALTH_URL'], timeout=1)"]
ENTRYPOINT ["kvgate"]
CMD ["--help"]
