"""The model types that are not built, and why; all others train in stage 3 as in one process."""

# Batch normalization of 2 x 1 x 1 values divides by a variance near zero. In one process, too, a relative change of the
# weights by 2e-16 moves the losses of the second step by 1e-5. These models normalize by running statistics instead.
FIXED_STATISTICS = {"d_fine", "deimv2"}

# Why a model type is left out: the reason, a pattern of the error, and the model types.
REASONS: list[tuple[str, str, str]] = [
    (
        "It needs the package timm.",
        r"""requires the timm library""",
        """
        edgetam edgetam_vision_model fast_vlm gemma3n gemma3n_vision pe_audio_video pe_audio_video_encoder
        pe_video pe_video_encoder perception_lm timm_backbone timm_wrapper
        """,
    ),
    (
        "It needs the package scipy.",
        r"""scipy""",
        """
        eomt eomt_dinov3 inkling_mm_model inkling_vision oneformer videomt
        """,
    ),
    (
        "It needs the package natten, detectron2 or torchaudio.",
        r"""natten|detectron2|torchaudio""",
        """
        dinat higgs_audio_v2_tokenizer layoutlmv2
        """,
    ),
    (
        "This version of transformers has no code for it.",
        r"""No module named 'transformers""",
        """
        glmga internlm3 iquestcoder layoutxlm pp_chart2table pp_chart2table_vision
        """,
    ),
    (
        "It is a part of other models, and no model class takes its configuration.",
        r"""it has no model class""",
        """
        blip_text_model chameleon_vqgan edgetam_mask_decoder edgetam_prompt_encoder
        edgetam_video_mask_decoder edgetam_video_prompt_encoder emu3_vqgan gemma4_unified_audio
        gemma4_unified_vision idefics_perciever idefics_vision sam2_mask_decoder sam2_prompt_encoder
        sam2_video_mask_decoder sam2_video_prompt_encoder sam3_geometry_encoder
        sam3_lite_text_geometry_encoder sam3_tracker_mask_decoder sam3_tracker_prompt_encoder
        sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder sam_hq_mask_decoder
        sam_hq_prompt_encoder sam_mask_decoder sam_prompt_encoder sapiens2_head t5_gemma_module
        vibevoice_diffusion
        """,
    ),
    (
        "Its forward needs inputs that no rule makes.",
        r"""KeyError: '|missing \d|NoneType|must (not )?be|no output is diff|size' failed""",
        """
        align blip_2_qformer blt_local_decoder blt_local_encoder clvp deepseek_ocr2_encoder dia_decoder
        dots3_note dots3_note_audio_encoder dots3_note_vision_encoder fastspeech2_conformer
        fastspeech2_conformer_with_hifigan flava_image_codebook florence_vision granite4_vision
        idefics2_perceiver jev minicpm_ocr_vision minicpmv4_6_vision minicpmv4_7_vision mllama_vision_model
        moshi_depth muse_glimmer_assistant omdet-turbo paddleocr_vl_vision phi4_multimodal_audio pi0
        pp_ocrv5_server_det pp_ocrv6_medium_det qwen2_5_omni_audio_encoder qwen2_5_omni_dit
        qwen3_omni_moe_audio_encoder qwen4_exp qwen4_exp_text sam3_detr_decoder sam3_lite_text_detr_decoder
        sam3_lite_text_mask_decoder sam3_mask_decoder voxtral_realtime_text xcodec
        """,
    ),
    (
        "The rules leave it with more than 8 million parameters, as its defaults are.",
        r"""has [\d,]+ parameters""",
        """
        bark bridgetower_vision_model chmv2 depth_pro dinov3_convnext dots3_note_text edgetam_video
        efficientloftr esmfold2 gemma3n_audio glm_image_vqmodel inkling_audio mimi_decoder molmo2
        molmo2_adapter muse_spark muse_spark_audio nemotron_h_omni neomme neucodec
        pocket_tts_audio_tokenizer_decoder qwen2_5_omni qwen2_5_omni_bigvgan qwen2_5_omni_token2wav rag
        sam2_video sam3_detr_encoder sam3_lite_text_detr_encoder sam3_tracker_video sam3_video
        unlimited_ocr_vision_encoder xcodec2
        """,
    ),
    (
        "Its configuration class refuses what the rules make, or its own defaults.",
        r"""configuration: |Config\w*: |ValidationError|Unrecognized model type""",
        """
        cohere_compass cohere_compass_text gemma4_assistant nougat
        """,
    ),
    (
        "The sizes that the rules choose do not fit together.",
        r"""Error: """,
        """
        clvp_encoder dbrx deepseek_ocr2_vision fun_asr_nano_encoder gemma4_audio gemma4_unified_assistant
        inkling2_vision janus_vqgan kimi_k25_vision lw_detr molmo2_vision muse_glimmer_vision
        muse_spark_vision pix2struct_text_model pp_doclayout_v3 pp_ocrv6_small_det qwen3_asr_encoder
        qwen3_omni_moe sam2 sam3_tracker seggpt t5gemma2_decoder t5gemma2_encoder t5gemma2_text tvp univnet
        unlimited_ocr_vision uvdoc vibevoice_acoustic_tokenizer_decoder vitmatte xclip_vision_model xlstm
        zamba
        """,
    ),
]
NOT_BUILT = {name: pattern for _, pattern, names in REASONS for name in names.split()}
