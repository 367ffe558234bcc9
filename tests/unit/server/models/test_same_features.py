"""Both text models have the same features."""

from trimaran.server.models.text_models import BLS_MAPS, ensemble_maps
from trimaran.server.repository.model_repository import ModelRepository, Role

# Which the ensemble leaves out, as its interface has no such tensors.
ONLY_BLS = {"image_input", "image_bytes_input", "image_url_input", "video_bytes_input",
            "num_draft_tokens", "use_draft_logits"}  # fmt: skip


async def test_ensemble_and_bls_have_the_same_tensors_and_wires(serve, tmp_path):
    async with serve():
        models = ModelRepository.load(tmp_path / "models").models
    ensemble, bls = models["ensemble"], models["tensorrt_llm_bls"]
    for side in ("input", "output"):
        of_ensemble, of_bls = (
            {t.name: (t.data_type, list(t.dims)) for t in getattr(m.config, side)}
            for m in (ensemble, bls)
        )
        assert of_ensemble == {k: v for k, v in of_bls.items() if k not in ONLY_BLS}
    roles = {models[name].role: name for name in ensemble.steps}
    assert roles.keys() == {Role.PREPROCESSING, Role.TOKEN, Role.POSTPROCESSING}
    wired = ensemble_maps(ensemble, roles)
    inputs = {tensor.name for tensor in ensemble.config.input}
    for part in ("preprocessing", "token", "token_from_preprocessing"):
        own, other = dict(getattr(wired, part)), dict(getattr(BLS_MAPS, part))
        if part != "token_from_preprocessing":
            other = {k: v for k, v in other.items() if v in inputs}
        assert own == other, part
    named = {tensor.name for tensor in ensemble.config.output}
    assert {k: v for k, v in wired.outputs.items() if v in named} == {
        k: v for k, v in BLS_MAPS.outputs.items() if v in named
    }
    assert set(BLS_MAPS.outputs.values()) >= named
