# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
#
#   make setup    a virtual environment in .venv with everything pinned
#   make build    C++ core, plugins, tests and the Python extension
#   make test     C++ and Python tests; the last line counts both runners. Costly ones take turns: DRAW=, else the commit
#   make test-all and those that 'make test' leaves out: long ones, all costly ones, all cases of sampled ones
#   make check    the inner loop: lint and the tests for what changed since they last passed
#   make coverage lines and branches that the tests run, and the map by which 'make check' chooses
#   make demo     fine-tune MiniLM, PyTorch and Ortrain side by side (STEPS=, EPOCHS=)
#   make bench    time training steps of Ortrain and its peers (BENCH="--quick --peers eager,ortrain")
#   make conformance  PyTorch's database of operators against the engine (CONFORMANCE="cumsum --samples 9")
#   make hf-contract  the Hugging Face trainer against transformers' own, two versions of it
#   make asan     C++ tests, quick Python tests, 100 000 bad inputs under AddressSanitizer and UBSan
#   make tsan     C++ tests of several threads under ThreadSanitizer (TSAN="--filter 'Threads*'")
#   make fuzz     readers, plans, kernels and extensions under libFuzzer (SECONDS=, RUNS=, FUZZ=onnx,text)
#   make capi-demo  train digits from C and C++, without Python in the process
#   make checkpoint-torture   kills processes while they save, damages what they saved
#   make distributed   ORTTrainer in several processes, and their examples (DISTRIBUTED="-k adasum")
#   make check-cuda  compile the GPU provider for sm_80 and sm_90, let cuDNN make plans (needs nvcc, no GPU)
#   make gpu-races   the simulator's tests while it looks at the accesses of all threads (RACES="--gtest_filter=*Softmax*")
#   make check-hip   and for gfx90a (needs hipcc, no GPU)
#   make gpu-all  everything to be run on a GPU; without one, what was not run and why (GPU_ALL="--list")
#   make soak     memory of many steps, shapes and modules (SOAK="--share 0.1")
#   make wheel        a wheel for the CPU, checked (PYTHON312=, WHEEL_CHECK=)
#   make wheel-gpu    a wheel with the kernels for NVIDIA GPUs, checked (NVCC=, PYTHON312=, WHEEL_CHECK=)
#   make gpu-host     what the host does in a build for CUDA, by a stand-in for the runtime (needs nvcc, no GPU; GPU_HOST="--pytorch PYTHON")
#   make gpu-kit      what a machine with a GPU needs beside the tree, in build/gpu-kit (KIT_ARCHITECTURES=)
#   make format   clang-format and ruff
#   make lock     pin what .venv holds now, with the hashes of its files
#   make clean    remove build outputs, keep .venv
#
# VENV=dir uses another environment; SETUP=no uses it as it is.

.DELETE_ON_ERROR:
.DEFAULT_GOAL := build
SHELL := /bin/sh

# Packages are installed while the compiler works. Recipes with work for all cores say so themselves.
MAKEFLAGS += --jobs=2
STARTED := $(shell date +%s)

PYTHON ?= python3
VENV ?= .venv
SETUP ?= yes
JOBS ?= $(shell nproc)
TORCH := 2.13.0
ABI3AUDIT := 0.0.26

VENV_DIR := $(abspath $(VENV))
PY := $(VENV_DIR)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
STAMPS := $(VENV_DIR)/.ortrain
# Files whose hashes are known, no others; a source package would be built with packages that no hash names.
LOCKED := install --no-deps --require-hashes --only-binary :all:
LOCKS := requirements

export VIRTUAL_ENV := $(VENV_DIR)
export PATH := $(VENV_DIR)/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: setup compile build test test-all check coverage lint fuzz demo bench conformance hf-contract capi-demo \
  checkpoint-torture distributed soak asan tsan wheel wheel-gpu gpu-host gpu-kit nvcc check-cuda check-hip gpu-races gpu-all \
  format lock clean

ifeq ($(SETUP),no)
setup:
else
setup: $(STAMPS)/editable
endif

$(STAMPS)/venv:
	tools/install_system_packages.sh $(PYTHON)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Development needs Python 3.11 or later: make PYTHON=path" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV_DIR)
	mkdir -p $(STAMPS) && touch $@

# What the compiler needs comes first: the rest is installed while it works.
$(STAMPS)/build-packages: $(LOCKS)/dev.lock | $(STAMPS)/venv
	grep -E '^($(subst $(empty) $(empty),|,$(strip $(WHEEL_PINS))))==' $(LOCKS)/dev.lock > $@.txt
	$(PIP) $(LOCKED) -r $@.txt
	cmake --version | awk 'NR == 1 { split($$3, v, "."); exit v[1] * 100 + v[2] < 324 }' || \
	  $(PIP) $(LOCKED) -r $(LOCKS)/cmake.lock
	touch $@

# A '+cpu' build where pip knows one by its hash; the plain name pulls gigabytes of CUDA on Linux.
$(STAMPS)/torch-$(TORCH): | $(STAMPS)/build-packages
	$(PY) -c 'import torch; assert torch.__version__.split("+")[0] == "$(TORCH)"' 2>/dev/null || \
	  $(PIP) $(LOCKED) -r $(LOCKS)/torch-cpu.lock || $(PIP) $(LOCKED) -r $(LOCKS)/torch.lock
	touch $@

$(STAMPS)/packages: $(LOCKS)/dev.lock $(LOCKS)/deepspeed.lock | $(STAMPS)/torch-$(TORCH)
	$(PIP) $(LOCKED) -r $(LOCKS)/dev.lock
	grep '^setuptools==' $(LOCKS)/deepspeed.lock > $@.txt && $(PIP) $(LOCKED) -r $@.txt
	DS_BUILD_OPS=0 $(PIP) $(LOCKED) --no-binary deepspeed --no-build-isolation -r $(LOCKS)/deepspeed.lock
	touch $@

$(STAMPS)/editable: pyproject.toml $(STAMPS)/packages
	$(PIP) install --no-build-isolation --no-deps -e .
	touch $@

ifeq ($(SETUP),no)
build/build.ninja: CMakePresets.json
else
build/build.ninja: CMakePresets.json | $(STAMPS)/build-packages
endif
	cmake --preset dev

compile: build/build.ninja
	cmake --build build -j $(JOBS)

build: setup compile

test: build
	$(PY) tools/run_tests.py --jobs $(JOBS) --started $(STARTED) $(if $(DRAW),--draw $(DRAW))

test-all: build
	$(PY) tools/run_tests.py --jobs $(JOBS) --started $(STARTED) --everything

check: build lint
	$(PY) tools/run_tests.py --jobs $(JOBS) --started $(STARTED) --quick

coverage: setup
	cmake --preset coverage
	cmake --build --preset coverage -j $(JOBS)
	$(PY) tools/run_coverage.py --jobs $(JOBS) $(COVERAGE)

lint: setup
	ruff check --quiet .
	$(PY) tools/check_layers.py
	$(PY) tools/check_sizes.py
	$(PY) tools/check_sources.py
	$(PY) tools/check_limited_api.py

demo: build
	$(PY) examples/minilm_reuters.py $(if $(STEPS),--steps $(STEPS)) $(if $(EPOCHS),--epochs $(EPOCHS))

bench: build
	$(PY) -m benchmarks.suite $(BENCH)

conformance: build
	$(PY) -m conformance $(CONFORMANCE)

# The newest minor line is in .venv; the one before it lies in a folder of its own.
hf-contract: build $(STAMPS)/transformers-before
	$(PY) -m pytest --everything tests/python/hf -v --show-capture=no $(HF)
	PYTHONPATH="$(STAMPS)/transformers-before:$$PYTHONPATH" \
	  $(PY) -m pytest --everything tests/python/hf -v --show-capture=no $(HF)

$(STAMPS)/transformers-before: $(LOCKS)/transformers-before.lock | $(STAMPS)/packages
	rm -rf $@
	$(PIP) $(LOCKED) --target $@ -r $<
	touch $@

asan: setup
	cmake --preset sanitize
	cmake --build --preset sanitize -j $(JOBS)
	$(PY) tools/run_sanitizers.py --jobs $(JOBS) $(ASAN)

# The newest clang that is installed: libFuzzer comes with it, and what tells ThreadSanitizer of OpenMP.
CLANG_CXX ?= $(firstword $(foreach v,++-22 ++-19 ++-16 ++-15 ++,$(shell command -v clang$(v))))

fuzz: setup
	cmake --preset fuzz $(if $(CLANG_CXX),-DCMAKE_CXX_COMPILER=$(CLANG_CXX))
	cmake --build --preset fuzz -j $(JOBS)
	$(PY) tools/run_fuzz.py --jobs $(JOBS) --seconds $(or $(SECONDS),60) --runs $(or $(RUNS),-1) $(if $(FUZZ),--targets $(FUZZ))

tsan: setup
	cmake --preset tsan $(if $(CLANG_CXX),-DCMAKE_CXX_COMPILER=$(CLANG_CXX))
	cmake --build --preset tsan -j $(JOBS)
	$(PY) tools/run_thread_sanitizer.py --jobs $(JOBS) $(TSAN)

# Blocks run one after another there, so each core has a share of the tests.
RACES ?= --gtest_filter=*SimulatedCase*:Index*:Join*:Gpu*:Gemm*:Matrix*:Conv*Parts*:Recurrent*:ThreadOrders*
gpu-races: setup
	cmake --preset races
	cmake --build --preset races -j $(JOBS)
	seq 0 $$(( $(JOBS) - 1 )) | OMP_NUM_THREADS=1 GTEST_TOTAL_SHARDS=$(JOBS) xargs -P $(JOBS) -I{} \
	  env GTEST_SHARD_INDEX={} build-races/ortrain_tests --gtest_brief=1 $(RACES)

capi-demo: build
	cmake --install build --component capi --prefix build/capi/prefix >/dev/null
	cmake -S examples/capi -B build/capi/example -DCMAKE_PREFIX_PATH="$(CURDIR)/build/capi/prefix" >/dev/null
	cmake --build build/capi/example >/dev/null
	$(PY) examples/capi/prepare.py build/capi/digits
	@ls -sh1 --dereference build/capi/prefix/lib*/libortrain.so build/capi/example/train_c build/capi/example/train_cpp
	build/capi/example/train_c build/capi/digits
	build/capi/example/train_cpp build/capi/digits

checkpoint-torture: build
	$(PY) -m ortrain.tools.checkpoint_torture $(TORTURE)

distributed: build
	$(PY) -m pytest --everything tests/python/distributed $(DISTRIBUTED)
	rm -rf build/elastic
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 \
	  examples/elastic.py --steps 60 --checkpoints build/elastic --lose-process-at 25

CUDA_LIBRARIES := $(STAMPS)/cuda-libraries

check-cuda: setup build/build.ninja $(CUDA_LIBRARIES)/ready
	$(PY) tools/check_device_code.py cuda --jobs $(JOBS)
	cmake --build build -j $(JOBS) --target ortrain_print_kernels
	$(PY) tools/check_generated_kernels.py --printer build/ortrain_print_kernels --arch sm_80,sm_90 \
	  --nvrtc $(CUDA_LIBRARIES)/nvidia/cu13/lib/libnvrtc.so.13 --threads $(JOBS)
	$(PY) tools/check_gpu_libraries.py $(CUDA_LIBRARIES)
	$(PY) tools/check_cudnn_plans.py $(CUDA_LIBRARIES)

# cuDNN loads cuBLASLt.
$(CUDA_LIBRARIES)/ready: $(LOCKS)/cudnn.lock $(LOCKS)/cublas.lock $(LOCKS)/cuobjdump.lock | $(STAMPS)/venv
	rm -rf $(@D)
	$(PIP) $(LOCKED) --target $(@D) -r $(LOCKS)/cudnn.lock -r $(LOCKS)/cublas.lock -r $(LOCKS)/cuobjdump.lock
	touch $@

check-hip: setup
	command -v $(or $(HIPCC),hipcc) >/dev/null || { test "$$(id -u)" -eq 0 && \
	  apt-get install -y -qq --no-install-recommends hipcc libamdhip64-dev; }
	$(PY) tools/check_device_code.py hip --jobs $(JOBS)

gpu-all: build
	$(PY) -m benchmarks.gpu_all $(GPU_ALL)

soak: build
	$(PY) -m conformance.soak $(SOAK)

# Wheels of the stable ABI, for CPython 3.12 and later. Built and checked in environments of its own;
# that for GPUs needs nvcc, no GPU. WHEEL_CHECK names environments that hold torch, numpy and onnx alone, to train in;
# one that is not there is made, with the CPU's build of torch where the index has one.
NVCC ?= $(or $(shell command -v nvcc),/usr/local/cuda/bin/nvcc)
CUDA_ARCHITECTURES ?= 80-real;90-real;90-virtual
WHEEL_DIR := build-wheel
WHEEL_PY := $(WHEEL_DIR)/env/bin/python
WHEEL_CHECK ?= $(WHEEL_DIR)/check
WHEEL_PINS := nanobind scikit-build-core pathspec packaging ninja numpy onnx ml-dtypes protobuf \
  typing-extensions onednn-devel-cpu-gomp onednn-cpu-gomp
ALONE := env -u VIRTUAL_ENV -u PYTHONPATH
WHEEL_PIP := $(ALONE) $(WHEEL_PY) -m pip --disable-pip-version-check -q

# $(1): the build folder's name, $(2): settings of CMake, $(3): of the check.
define build_wheel
rm -rf $(WHEEL_DIR)/dist
CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(WHEEL_PIP) wheel \
  --no-build-isolation --no-deps --wheel-dir $(WHEEL_DIR)/dist -C build-dir=$(WHEEL_DIR)/$(1) \
  $(addprefix -C cmake.define.,$(2)) .
$(ALONE) $(WHEEL_PY) tools/check_wheel.py $(WHEEL_DIR)/dist/*.whl $(3) \
  $(patsubst %,--python %/bin/python,$(WHEEL_CHECK))
mkdir -p dist && mv $(WHEEL_DIR)/dist/*.whl dist/
endef

wheel: $(WHEEL_DIR)/env/ready $(addsuffix /bin/python,$(WHEEL_CHECK))
	$(call build_wheel,cpu)

wheel-gpu: nvcc $(WHEEL_DIR)/env/ready $(WHEEL_DIR)/cudnn $(addsuffix /bin/python,$(WHEEL_CHECK))
	$(call build_wheel,gpu,ORTRAIN_GPU=cuda CMAKE_CUDA_COMPILER="$(NVCC)" \
	  CMAKE_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)" \
	  ORTRAIN_CUDNN_ROOT="$(abspath $(WHEEL_DIR)/cudnn)",$(if $(wildcard ortrain/gpu),--device-code))

$(WHEEL_DIR)/cudnn: $(LOCKS)/cudnn.lock | $(WHEEL_DIR)/env/ready
	rm -rf $@
	$(WHEEL_PIP) $(LOCKED) --target $@ -r $<
	touch $@

# What goes to a machine with a GPU, beside the tree itself: the wheel for its devices alone, and the
# program of the operators' cases.
GPU_KIT := build/gpu-kit
KIT_ARCHITECTURES ?= 90-real

gpu-kit:
	$(MAKE) wheel-gpu CUDA_ARCHITECTURES="$(KIT_ARCHITECTURES)" WHEEL_CHECK="$(WHEEL_CHECK)"
	cmake --build $(WHEEL_DIR)/gpu -j $(JOBS) --target ortrain_check_kernels
	rm -rf $(GPU_KIT) && mkdir -p $(GPU_KIT)/wheels $(GPU_KIT)/bin
	cp "$$(ls -t dist/ortrain-*.whl | head -n 1)" $(GPU_KIT)/wheels/
	grep -E '^expecttest==' $(LOCKS)/dev.lock > $(GPU_KIT)/wheels.txt
	$(WHEEL_PIP) download --only-binary :all: --no-deps --require-hashes -d $(GPU_KIT)/wheels -r $(GPU_KIT)/wheels.txt
	strip -o $(GPU_KIT)/bin/ortrain_check_kernels $(WHEEL_DIR)/gpu/ortrain_check_kernels
	cp tools/gpu_kit/run.sh $(GPU_KIT)/
	du -sh $(GPU_KIT)

# The wheel's objects, linked once more with what stands in for the CUDA runtime.
gpu-host: setup build/build.ninja $(CUDA_LIBRARIES)/ready
	$(MAKE) wheel-gpu CUDA_ARCHITECTURES="$(KIT_ARCHITECTURES)" WHEEL_CHECK="$(WHEEL_CHECK)"
	cmake --build build -j $(JOBS) --target _core
	$(PY) tools/check_gpu_host.py $(WHEEL_DIR)/gpu --libraries $(CUDA_LIBRARIES) $(GPU_HOST)

nvcc:
	@test -x "$(NVCC)" || { echo "No CUDA compiler at $(NVCC). Install CUDA 13's nvcc, or name it: NVCC=path" >&2; exit 1; }

$(WHEEL_DIR)/env/ready: $(LOCKS)/dev.lock $(LOCKS)/abi3audit.lock tools/find_wheel_python.sh
	python=$$(tools/find_wheel_python.sh $(PYTHON312)) && $(ALONE) "$$python" -m venv --clear $(WHEEL_DIR)/env
	grep -E '^($(subst $(empty) $(empty),|,$(strip $(WHEEL_PINS))))==' $(LOCKS)/dev.lock > $@.txt
	$(WHEEL_PIP) $(LOCKED) -r $@.txt
	$(WHEEL_PIP) $(LOCKED) -r $(LOCKS)/abi3audit.lock
	cmake --version | awk 'NR == 1 { split($$3, v, "."); exit v[1] * 100 + v[2] < 324 }' || \
	  $(WHEEL_PIP) $(LOCKED) -r $(LOCKS)/cmake.lock
	touch $@

# torch, what it needs besides CUDA, numpy and onnx.
$(addsuffix /bin/python,$(WHEEL_CHECK)):
	python=$$(tools/find_wheel_python.sh $(PYTHON312)) && $(ALONE) "$$python" -m venv $(@:/bin/python=)
	grep -vE '^(#|cuda-|nvidia-|torch=|triton=)' $(LOCKS)/torch.lock > $@.txt
	grep -E '^(numpy|onnx|ml-dtypes|protobuf)==' $(LOCKS)/dev.lock >> $@.txt
	for lock in $(LOCKS)/torch-cpu.lock $(LOCKS)/torch.lock; do \
	  $(ALONE) $@ -m pip --disable-pip-version-check -q $(LOCKED) -r $$lock && break; done
	$(ALONE) $@ -m pip --disable-pip-version-check -q $(LOCKED) -r $@.txt

format: setup
	git ls-files -z '*.cpp' '*.h' | xargs -0 -r clang-format -i
	ruff check --quiet --fix .
	ruff format --quiet .

# torch-cpu.lock is of an index that uv is not told about.
lock: setup $(STAMPS)/locker
	$(PIP) freeze --exclude-editable | grep -viE '^(pip|setuptools|torch|deepspeed)=' > $(STAMPS)/pins.txt
	PATH="$(STAMPS)/locker/bin:$$PATH"; lock() { $(PY) tools/lock_packages.py "$$@" || exit 1; }; \
	lock $(LOCKS)/dev.lock --pins $(STAMPS)/pins.txt; \
	lock $(LOCKS)/torch.lock --resolve torch==$(TORCH); \
	lock $(LOCKS)/abi3audit.lock --resolve abi3audit==$(ABI3AUDIT); \
	for name in cmake cublas cudnn cuobjdump deepspeed locker transformers-before; do lock $(LOCKS)/$$name.lock; done

$(STAMPS)/locker: $(LOCKS)/locker.lock | $(STAMPS)/venv
	rm -rf $@
	$(PIP) $(LOCKED) --target $@ -r $<
	touch $@

clean:
	rm -rf build build-* dist .demo
	rm -f python/ortrain/*.so
