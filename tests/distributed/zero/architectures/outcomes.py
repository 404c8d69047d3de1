"""Model types of transformers that are not tried, and the exceptions for some that are."""

# Batch normalization of 2 x 1 x 1 values divides by a variance near zero. In one process, too, a relative change of the
# weights by 2e-16 moves the losses of the second step by 1e-5. These models normalize by running statistics instead.
FIXED_STATISTICS = {"d_fine", "deimv2"}

# No rule makes a model or inputs of these: they need other packages, or code that this version of transformers lacks,
# are parts without a model class, or stay too large.
NAMES = """
    align bark blip_2_qformer blip_text_model blt_local_decoder blt_local_encoder bridgetower_vision_model
    chameleon_vqgan chmv2 clvp clvp_encoder cohere_compass cohere_compass_text dbrx deepseek_ocr2_encoder
    deepseek_ocr2_vision depth_pro dia_decoder dinat dinov3_convnext dots3_note dots3_note_audio_encoder
    dots3_note_text dots3_note_vision_encoder edgetam edgetam_mask_decoder edgetam_prompt_encoder edgetam_video
    edgetam_video_mask_decoder edgetam_video_prompt_encoder edgetam_vision_model efficientloftr emu3_vqgan eomt
    eomt_dinov3 esmfold2 fast_vlm fastspeech2_conformer fastspeech2_conformer_with_hifigan flava_image_codebook
    florence_vision fun_asr_nano_encoder gemma3n gemma3n_audio gemma3n_vision gemma4_assistant gemma4_audio
    gemma4_unified_assistant gemma4_unified_audio gemma4_unified_vision glm_image_vqmodel glmga granite4_vision
    higgs_audio_v2_tokenizer idefics2_perceiver idefics_perciever idefics_vision inkling2_vision inkling_audio
    inkling_mm_model inkling_vision internlm3 iquestcoder janus_vqgan jev kimi_k25_vision layoutlmv2 layoutxlm
    lw_detr mimi_decoder minicpm_ocr_vision minicpmv4_6_vision minicpmv4_7_vision mllama_vision_model molmo2
    molmo2_adapter molmo2_vision moshi_depth muse_glimmer_assistant muse_glimmer_vision muse_spark
    muse_spark_audio muse_spark_vision nemotron_h_omni neomme neucodec nougat omdet-turbo oneformer
    paddleocr_vl_vision pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder perception_lm
    phi4_multimodal_audio pi0 pix2struct_text_model pocket_tts_audio_tokenizer_decoder pp_chart2table
    pp_chart2table_vision pp_doclayout_v3 pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det
    qwen2_5_omni qwen2_5_omni_audio_encoder qwen2_5_omni_bigvgan qwen2_5_omni_dit qwen2_5_omni_token2wav
    qwen3_asr_encoder qwen3_omni_moe qwen3_omni_moe_audio_encoder qwen4_exp qwen4_exp_text rag sam2
    sam2_mask_decoder sam2_prompt_encoder sam2_video sam2_video_mask_decoder sam2_video_prompt_encoder
    sam3_detr_decoder sam3_detr_encoder sam3_geometry_encoder sam3_lite_text_detr_decoder
    sam3_lite_text_detr_encoder sam3_lite_text_geometry_encoder sam3_lite_text_mask_decoder sam3_mask_decoder
    sam3_tracker sam3_tracker_mask_decoder sam3_tracker_prompt_encoder sam3_tracker_video
    sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder sam3_video sam_hq_mask_decoder
    sam_hq_prompt_encoder sam_mask_decoder sam_prompt_encoder sapiens2_head seggpt t5_gemma_module
    t5gemma2_decoder t5gemma2_encoder t5gemma2_text timm_backbone timm_wrapper tvp univnet unlimited_ocr_vision
    unlimited_ocr_vision_encoder uvdoc vibevoice_acoustic_tokenizer_decoder vibevoice_diffusion videomt vitmatte
    voxtral_realtime_text xclip_vision_model xcodec xcodec2 xlstm zamba
"""
NOT_BUILT = set(NAMES.split())
