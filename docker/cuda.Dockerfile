# OPER for NVIDIA devices, with the device kernels of sm_80, sm_90 and sm_100:
#
#   docker build -f docker/cuda.Dockerfile -t oper-cuda .
#   docker run --rm --gpus all --ipc host -v "$PWD:/data" oper-cuda torchrun … train.py
#
# CUDA is the release that torch's CUDA build is for. The final image has no compiler: torch's
# packages bring CUDA's libraries, and the container runtime brings the driver.
ARG CUDA=13.0.1
ARG UBUNTU=ubuntu24.04

FROM nvidia/cuda:${CUDA}-devel-${UBUNTU} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN make install VENV=/opt/oper VARIANT=gpu \
    && /opt/oper/bin/pip install --no-cache-dir --no-deps --no-build-isolation --force-reinstall . \
    && /opt/oper/bin/python scripts/build_cuda.py \
    && cp oper/_*.so "$(cd / && /opt/oper/bin/python -c 'import oper; print(oper.__path__[0])')"

FROM nvidia/cuda:${CUDA}-base-${UBUNTU}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/oper /opt/oper
ENV PATH="/opt/oper/bin:${PATH}"
USER ubuntu
WORKDIR /data
CMD ["oper", "--help"]
