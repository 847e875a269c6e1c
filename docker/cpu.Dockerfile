# OPER for CPU ranks:
#
#   docker build -f docker/cpu.Dockerfile -t oper .
#   docker run --rm -v "$PWD:/data" oper oper profile log.parquet -o profile
#
# TORCH_INDEX is the index of torch's CPU build, as in `make install TORCH_INDEX=…`.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
ARG TORCH_INDEX=
# The package is then installed as users install it, so that the image needs no checkout.
RUN make install VENV=/opt/oper VARIANT=cpu TORCH_INDEX="${TORCH_INDEX}" \
    && /opt/oper/bin/pip install --no-cache-dir --no-deps --no-build-isolation --force-reinstall .

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/oper /opt/oper
ENV PATH="/opt/oper/bin:${PATH}"
RUN useradd --create-home oper
USER oper
WORKDIR /data
CMD ["oper", "--help"]
