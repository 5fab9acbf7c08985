# The pipeline with an NCCL-enabled Horovod, for GPUs and CPUs: no compilers, a user without rights.
# How to build it and to run it on one or several hosts: docs/containers.md.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS build
# pip's settings, for builders behind a mirror or a proxy. This stage is not part of the image: neither are they.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG PIP_CERT
ARG PIP_DEFAULT_TIMEOUT
ARG SSL_CERT_FILE
ARG MAKEFLAGS
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        cmake g++ make patch python3.11-dev python3.11-venv
WORKDIR /opt/barlow
COPY requirements.txt run.sh ./
COPY scripts/build_horovod.sh scripts/horovod.patch scripts/
# Triton goes again (900 MB): it needs a C compiler, which the image lacks, and torch uses it where it finds it.
RUN PIP_NO_CACHE_DIR=1 HOROVOD_BUILD=nccl ./run.sh setup \
    && .venv/bin/python -m pip uninstall --yes triton

FROM ${BASE_IMAGE}
# horovodrun reaches other hosts by ssh, and sshd lets it into a container; NCCL finds InfiniBand by libibverbs.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ibverbs-providers libibverbs1 openssh-client openssh-server python3.11 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /etc/ssh/ssh_host_*
# An sshd that needs no root: `--entrypoint /usr/sbin/sshd IMAGE -De`. The job's one key is its host key, too.
RUN printf '%s\n' 'Port 2222' 'HostKey /home/barlow/.ssh/id_ed25519' 'PidFile none' 'PasswordAuthentication no' \
        'UsePAM no' 'StrictModes no' > /etc/ssh/sshd_config.d/barlow.conf
# Only results and caches may be written.
ARG USER_ID=1000
WORKDIR /opt/barlow
RUN useradd --uid ${USER_ID} --create-home barlow \
    && install -d -m 1777 /home/barlow data outputs
COPY --from=build /opt/barlow/.venv .venv
COPY . .
ENV HOME=/home/barlow USER=barlow
USER ${USER_ID}
ENTRYPOINT ["/opt/barlow/run.sh"]
