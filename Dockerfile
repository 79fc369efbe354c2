# Dreamfleet in a container:
#   docker build -t dreamfleet .
#   docker run --rm --init -v dreamfleet-runs:/runs dreamfleet
# Extras of pyproject.toml are a build argument; `cuda` is all that a GPU needs besides its driver:
#   docker build -t dreamfleet:cuda --build-arg EXTRAS=cuda .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# Layers are in the order of how seldom they change: a change of the code rebuilds the last one only.
RUN useradd --uid 1000 --create-home dreamfleet \
    && install -d -o dreamfleet -g dreamfleet /runs /runs/run /runs/run/invitations
WORKDIR /opt/dreamfleet
COPY locks/base.txt locks/
RUN pip install --no-deps --require-hashes -r locks/base.txt
ARG EXTRAS=""
COPY pyproject.toml ./
# The packages of the extras, with an empty package in place of Dreamfleet.
# hadolint ignore=DL3013
RUN touch README.md LICENSE && install -D /dev/null src/dreamfleet/__init__.py \
    && pip install --no-build-isolation ".${EXTRAS:+[$EXTRAS]}"
COPY README.md LICENSE ./
COPY src src
RUN pip install --no-build-isolation --no-deps --force-reinstall .

USER 1000:1000
WORKDIR /runs
# Whether the run in LOGDIR is under way and responds. `docker stop` needs --time 120: it saves first.
ENV LOGDIR=/runs/run
HEALTHCHECK --interval=60s --timeout=30s --start-period=5m \
    CMD ["sh", "-c", "dreamfleet status $LOGDIR --check"]
ENTRYPOINT ["dreamfleet"]
CMD ["train", "--logdir", "/runs/run"]
