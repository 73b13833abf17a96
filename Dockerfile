# Web server, worker and scheduler in one image; which of them it is, the command says.
#
# Hosts are reached from it by ssh, and work on images is done there: the image holds no qemu-img, its user is an
# ordinary one, and it needs no privilege. A worker on a hypervisor itself runs without a container: docs/deployment.md.

FROM node:22-bookworm-slim AS browser
WORKDIR /build
COPY package.json package-lock.json ./
RUN npm ci --ignore-scripts --omit=dev --no-audit --no-fund

FROM python:3.11-slim-bookworm AS python
# For the bindings of libvirt and LDAP, which are built here.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libldap2-dev libsasl2-dev libvirt-dev pkg-config \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/run.lock /build/run.lock
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --require-hashes --requirement /build/run.lock

FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends libldap-2.5-0 libvirt0 openssh-client \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --system --gid 10001 storage-admin \
    && useradd --system --uid 10001 --gid 10001 --home-dir /data --no-create-home storage-admin \
    && install -d -o storage-admin -g storage-admin -m 0700 /data
WORKDIR /app
COPY --from=python /opt/venv /opt/venv
COPY --from=browser /build/node_modules/htmx.org/dist node_modules/htmx.org/dist
COPY --from=browser /build/node_modules/chart.js/dist node_modules/chart.js/dist
COPY --from=browser /build/node_modules/js-sha256/build node_modules/js-sha256/build
COPY --from=browser /build/node_modules/@tabler/core/dist/css node_modules/@tabler/core/dist/css
COPY . .
# The root filesystem may be read-only later on.
RUN /opt/venv/bin/python -m compileall -q .
ENV PYTHONUNBUFFERED=1 \
    STORAGE_ADMIN_DATA_DIR=/data \
    STORAGE_ADMIN_BIND=0.0.0.0:8000 \
    STORAGE_ADMIN_LOCAL=0
USER 10001:10001
VOLUME /data
EXPOSE 8000
ENTRYPOINT ["/opt/venv/bin/python", "manage.py"]
CMD ["web"]
