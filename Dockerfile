# docker build -t megatron .      with --build-arg USER_ID=$(id -u) where your number is not 1000
# CUDA 13 needs a driver of 580 or newer. For 535, 550, or 560 and newer (what the base image of CUDA 12.6 lets start):
#   docker build -t megatron . --build-arg CUDA=12.6.3 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126
# docker run --gpus all --shm-size=2g -v "$PWD/data:/app/data" -v "$PWD/runs:/app/runs" megatron python deepy.py train.py configs/mep.yml
# torch brings its own CUDA libraries; the base image's job is to ask the driver for this version of CUDA.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04

LABEL org.opencontainers.image.title="megatron-positions" \
      org.opencontainers.image.description="Train GPTs with any positional encoding and measure how they extrapolate in length" \
      org.opencontainers.image.licenses="Apache-2.0"

# Compilers and Python's headers: Triton and DeepSpeed build what they launch when it is first used.
# openssh-client: DeepSpeed's launcher reaches other machines.
# No versions: Ubuntu's archive keeps the newest of each package alone, so an image with versions soon fails to build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc git libc6-dev openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# What a container writes into mounted folders belongs to this number, so it is that of the user outside.
# The base image gives 1000 to a user of its own.
ARG USER_ID=1000
RUN userdel --remove ubuntu \
    && useradd --create-home --no-log-init --uid "$USER_ID" researcher \
    && install -d -o researcher -g researcher /app /venv
USER $USER_ID
WORKDIR /app

ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
COPY --chown=researcher requirements.txt constraints.txt ./
# PyPI has the same torch; pip prefers the build of this index, because +cu130 makes its version the higher one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN python3 -m venv /venv \
    && pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -r requirements.txt -c constraints.txt

COPY --chown=researcher . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
CMD ["python", "deepy.py", "--help"]
