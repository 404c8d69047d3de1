"""Most architectures of transformers, built small, train in stage 3 as in one process.

Run one of them with `scripts/test.sh -m full -k "[llama]"`.
"""

import pytest
from torch import Tensor, nn

from tests.distributed.zero.architectures.tiny_models import KINDS, build, classes_of, loss_of
from tests.ranks import run_ranks
from tests.twins import Twins
from zero.settings.config import ZeroConfig

# A gradient that is zero in exact arithmetic is some 1e-13, and differs with the order of additions. Adam's step has a
# slope of at most lr / eps = 10 there.
ADAM = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
# The rules make no model of these, or no inputs, or it stays too large, or it needs another package, or it normalizes
# so few values that their variance is near zero.
NAMES = """
    align audioflamingo3 bailing_hybrid blip-2 blt canary cohere_asr cohere_compass_text cvt dbrx dia dinat
    donut-swin dots3_note dots3_note_text efficientnet emu3 encoder-decoder esm fun_asr_nano fuyu gemma3 gemma3n
    gemma3n_text gemma4_assistant gemma4_unified_assistant glmasr got_ocr2 granite_speech granite_speech5_ctc
    granite_speech_plus hgnet_v2 imagegpt kimi_linear kyutai_speech_to_text lasr_ctc levit lfm3 llama4 mobilenet_v2
    mobilevitv2 modernvbert moonshine moonshine_streaming moss_transcribe_diarize musicflamingo musicgen
    musicgen_melody nemo_speechlm neomme parakeet_ctc perceiver pop2piano pvt qwen2_audio qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_asr qwen4_exp qwen4_exp_text seamless_m4t seamless_m4t_v2 shieldgemma2 siglip2
    speech-encoder-decoder speech_to_text speecht5 t5gemma2 textnet timm_wrapper ultravbert vibevoice vibevoice_asr
    videoprism voxtral voxtral_realtime wav2vec2-bert xlstm zamba
"""
NOT_BUILT = set(NAMES.split())
KIND_OF = {name: kind for kind in reversed(KINDS) for name in classes_of(kind) if name not in NOT_BUILT}


def check_trains_as_one_process(model_type: str) -> None:
    kind = KIND_OF[model_type]
    model = build(kind, model_type)
    config, numel = model.config, sum(param.numel() for param in model.parameters())

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        return loss_of(module, config, kind, seed=100 * step + rank)

    twins = Twins(model, ZeroConfig(stage=3, bucket_numel=max(5000, numel // 50)), **ADAM)
    for step in range(2):
        twins.backward(step, loss)
        assert any(param.grad is not None and param.grad.any() for param in twins.plain.parameters())
        twins.step()


@pytest.mark.full
@pytest.mark.parametrize("model_type", KIND_OF)
def test_stage_3_trains_as_one_process(model_type):
    run_ranks(2, check_trains_as_one_process, model_type)
