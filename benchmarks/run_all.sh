#!/usr/bin/env bash
# Every figure of docs/benchmarks.md, on an otherwise idle machine; about twenty minutes on two cores.
# PEERS: a folder for an environment with other engines, which is made if it is missing and then takes
# turns with quire; another half hour. GGUF_FILES: files for quire and llama.cpp. The front page's plot
# needs both.
set -euo pipefail
cd "$(dirname "$0")/.."
results=benchmarks/results
python=.venv/bin/python
quire=.venv/bin/quire

$quire bench throughput --dataset-name sharegpt --max-output-len 512 --num-prompts 128 --repeats 5 \
  --quiet --output-json $results/throughput_bundled_sharegpt.json
$quire bench throughput --dataset-name alpaca --num-prompts 256 --repeats 5 \
  --quiet --output-json $results/throughput_bundled_alpaca.json
$quire bench latency --batch-size 1 --input-len 32 --output-len 128 --num-iters 10 \
  --quiet --output-json $results/latency_bundled.json
$python -m benchmarks.serving.front --output $results/front.json
$python -m benchmarks.serving.serving --output $results/serving.json
$python -m benchmarks.serving.serving --output $results/serving_1_thread.json -- --num-threads 1
$python -m benchmarks.scheduling.scheduler --output $results/scheduler.json
$python -m benchmarks.scheduling.flight_recorder --output $results/flight_recorder.json
$python -m benchmarks.cache.kv_waste --output $results/kv_waste.json
$python -m benchmarks.cache.block_sharing --output $results/block_sharing.json
$python -m benchmarks.decoding.speculation --quantization int8 --output $results/speculation.json
$python -m benchmarks.decoding.structured --output $results/structured.json
$python -m benchmarks.steps.captured_rows --quantization int8 --turns 5 --output $results/captured_rows_qwen3.json
$python -m benchmarks.steps.captured_rows --model benchmarks/models/llama-12m --turns 45 \
  --output $results/captured_rows_llama.json
$python -m benchmarks.steps.step_tokens --turns 5 --output $results/step_tokens.json
$python -m benchmarks.decoding.beams --output $results/beams.json
$python -m benchmarks.steps.threads_cpu --output $results/threads_cpu.json
$python -m benchmarks.kernels.attention_cpu --output $results/attention_cpu.json
$python -m benchmarks.kernels.latent_attention_cpu --threads 2 --output $results/latent_attention_cpu.json
$python -m benchmarks.kernels.draw_cpu --output $results/draw_cpu.json
for threads in 1 2; do
  $python -m benchmarks.kernels.linear_cpu --threads $threads --output $results/linear_cpu_threads_$threads.json
  $python -m benchmarks.kernels.linear_quantized_cpu --quick --threads $threads \
    --output $results/linear_quantized_cpu_threads_$threads.json
done
$python -m benchmarks.kernels.quantization_formats_cpu --output $results/quantization_formats_cpu.json
$python -m benchmarks.quality.quantization_quality --output $results/quantization_quality.json
$python -m benchmarks.quality.kv_cache_quality --max-bytes 2000 --output $results/kv_cache_quality.json
$python -m benchmarks.quality.latent_cache_quality --output $results/latent_cache_quality.json
peers=() logits=()
if [[ -n "${PEERS:-}" ]]; then
  if [[ ! -x "$PEERS/bin/python" ]]; then
    python3 -m venv "$PEERS"
    "$PEERS/bin/pip" install openvino-genai optimum-intel gguf vllm
    # for this processor, not for any; docs/benchmarks.md says which flags a processor with AMX needs
    CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON}" "$PEERS/bin/pip" install --no-binary llama-cpp-python llama-cpp-python
  fi
  converted=$(mktemp -d)
  trap 'rm -r "$converted"' EXIT
  peers=(--engine quire openvino llama_cpp vllm --work-dir "$converted")
  for engine in openvino llama_cpp vllm; do peers+=(--python "$engine=$PEERS/bin/python"); done
  for engine in openvino llama_cpp; do logits+=(--python "$engine=$PEERS/bin/python"); done
  PATH="$PATH:$PEERS/bin" $python -m benchmarks.serving.serving --server vllm --output $results/serving_vllm.json -- --enforce-eager
  if [[ -n "${GGUF_FILES:-}" ]]; then
    # shellcheck disable=SC2086  several files
    $python -m benchmarks.peers.gguf_cpu $GGUF_FILES --llama-python "$PEERS/bin/python" --output $results/gguf_cpu.json
  fi
  $python -m benchmarks.peers.gguf_cpu --work-dir "$converted" --llama-python "$PEERS/bin/python" \
    --shapes benchmarks/models/{qwen3.5-0.8b,lfm2-1.2b,deepseek-v2-lite-4-layers} --repeats 2 --outputs 32 \
    --output $results/gguf_cpu_recurrent.json
fi
$python -m benchmarks.quality.peer_quality "${logits[@]}" --output $results/peer_quality.json
$python -m benchmarks.quality.first_tokens ${PEERS:+--llama-python "$PEERS/bin/python"} --output $results/first_tokens.json
$python -m benchmarks.kernels.cpu_limits --threads 2 --repeats 12 --output $results/cpu_limits.json
$python -m benchmarks.peers.cpu_table "${peers[@]}" --output-folder $results/cpu_turns
$python -m benchmarks.peers.cpu_mixed "${peers[@]}" --repeats 3 --output-folder $results/cpu_mixed
$python -m benchmarks.serving.core_faults --output $results/core_faults.json
$python -m benchmarks.serving.server_start --output $results/server_start.json
$python -m benchmarks.serving.import_time --output $results/import_time.json
$python -m benchmarks.serving.images --output $results/images.json # needs transformers
$python -m benchmarks.serving.server_faults --output $results/server_faults.json
$python -m benchmarks.serving.observed --output $results/observed.json
$python -m benchmarks.scheduling.policies --output $results/policies.json
$python -m benchmarks.scheduling.simulated_against_measured --output $results/simulated_against_measured.json
$python -m benchmarks.paper.paper $results/paper
$python -m benchmarks.cache.shared_prefix_simulated --output $results/shared_prefix_simulated.json
$python -m benchmarks.cache.shared_prefix --output $results/shared_prefix.json
$python -m benchmarks.cache.recovery --repeats 2 --output $results/recovery.json
$python -m benchmarks.scheduling.soak --steps 1000000 --seed 100000 --output $results/soak.json
$python -m benchmarks.plots # needs quire[plots]
