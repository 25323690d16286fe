import pytest
import timm
import torch
from torch import nn

from aphq.engine.folder import RunFolder
from aphq.engine.workspace import ImageRows
from aphq.models.student import enable
from aphq.recipe import Views
from aphq.stages.layernorm import reparameterise_norms

from ..runs import all_images, pixels, short, workspace


def test_the_walk_shows_what_teacher_and_student_see_and_say(tiny_swin: nn.Module) -> None:
    work = workspace(tiny_swin, short(calibration__batch=5))
    with torch.no_grad():  # a student that differs from its second unit on
        work.student.get_parameter(f"{work.units[1].name}.mlp.fc2.bias")[0] += 1
    images = all_images(work)
    everything = slice(None)
    x = y = images
    visited = []
    for visit in work.walk():
        assert torch.allclose(visit.teacher_in[everything], x, atol=1e-5)
        assert torch.allclose(visit.student_in[everything], y, atol=1e-5)
        out = visit.unit.run(work.teacher, x)
        assert torch.allclose(visit.teacher_out[everything], out, atol=1e-5)
        x = visit.unit.bridge(work.teacher, out)
        y = visit.unit.bridge(work.student, visit.unit.run(work.student, y))
        visited.append(visit.unit.name)
    assert visited == [unit.name for unit in work.units]
    assert torch.allclose(x, work.teacher(images), atol=1e-5)
    assert torch.allclose(y, work.student(images), atol=1e-5)
    assert not torch.allclose(x, y, atol=1e-3)


def test_changes_made_on_a_visit_reach_the_next_unit(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit)
    for visit in work.walk():
        if visit.unit.name == "patch_embed":
            work.student.get_parameter("patch_embed.proj.bias").data += 1
        elif visit.unit.name == "blocks.0":
            assert not torch.allclose(visit.student_in[slice(None)], visit.teacher_in[slice(None)])
            return


def test_walking_one_model_may_take_fewer_images(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit)
    assert all(len(rows) == 6 for _, rows in work.walk_one(work.teacher, work.image_rows(6)))
    assert all(len(rows) == 16 for _, rows in work.walk_one(work.teacher, work.image_rows(600)))


@pytest.mark.parametrize("family", ["tiny_vit", "tiny_swin"])
def test_the_teachers_logits_are_computed_once(request: pytest.FixtureRequest, family: str) -> None:
    work = workspace(request.getfixturevalue(family), short(calibration__batch=5))
    passed: list[int] = []
    embed = work.teacher.get_submodule("patch_embed")
    handle = embed.register_forward_pre_hook(lambda _, inputs: passed.append(len(inputs[0])))
    first, again = work.teacher_logits, work.teacher_logits
    handle.remove()
    assert sum(passed) == 16
    assert again is first
    torch.testing.assert_close(first[slice(None)], work.teacher(all_images(work)), rtol=1e-4, atol=1e-5)
    index = torch.tensor([7, 0])
    assert torch.equal(first[index], first[slice(None)][index])


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_on_the_cpu_every_pass_has_the_recipes_batch(tiny_vit: nn.Module, batch: int) -> None:
    work = workspace(tiny_vit, short(calibration__batch=batch))
    assert work.pass_batch == work.batch == batch


def test_image_rows_end_where_they_should(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit)
    rows = ImageRows(work.images, 6, work.device)
    assert len(rows) == 6
    assert rows[slice(4, 8)].shape == (2, 3, 32, 32)
    assert torch.equal(rows[torch.tensor([5, 0])], all_images(work)[[5, 0]])


def test_a_pool_holds_the_images_and_views_of_each(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, short(), pixels(6))
    images = work.image_rows()[slice(None)]
    pool = work.pool(Views(copies=2), "a stage")
    assert len(pool) == 18
    assert torch.equal(pool[slice(0, 6)], images)
    first, second = pool[slice(6, 12)], pool[slice(12, 18)]
    assert not torch.equal(first, second)
    assert torch.equal(work.pool(Views(copies=2), "a stage")[slice(6, 12)], first), "a run that goes on sees the same"
    assert isinstance(work.pool(Views(), "a stage"), ImageRows)
    assert all(len(visit.teacher_out) == len(visit.student_in) == 18 for visit in work.walk(pool))


@pytest.mark.parametrize("family", ["tiny_vit", "tiny_swin"])
def test_a_pool_holds_as_many_views_as_the_largest_activations_leave_room_for(
    family: str, request: pytest.FixtureRequest
) -> None:
    work = workspace(request.getfixturevalue(family), short(), pixels(6))
    largest = max(rows[slice(0, 1)].numel() for visit in work.walk() for rows in (visit.teacher_in, visit.teacher_out))
    for fit, room in ((2, 3.01), (1, 2.99), (0, 1.5), (0, 0.5)):
        pool = work.pool(Views(copies=2, gigabytes=room * 6 * largest * 4 / 1e9), "a stage")
        assert len(pool) == 6 * (1 + fit)


def test_views_of_a_vision_transformer_of_base_size_all_fit() -> None:
    model = timm.create_model("vit_base_patch16_224", depth=1)
    work = workspace(model, short(), pixels(1, size=224))
    assert 1024 * 32 * work.largest_row * 4 / 1e9 < Views().gigabytes


def test_memory_is_given_back_along_the_walk(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit)
    for visit in work.walk():
        assert work.store.used["host"] > 0, visit.unit.name
    del visit
    assert work.store.used["host"] == 0
    assert work.store.peak["host"] > 0


def test_a_unit_comes_back_from_its_checkpoint_with_the_bias_it_gained(tiny_swin: nn.Module, tmp_path: object) -> None:
    work, fresh = workspace(tiny_swin), workspace(tiny_swin)
    work.folder = fresh.folder = RunFolder(tmp_path)  # type: ignore[arg-type]
    reparameterise_norms(work, work.recipe.stage("layernorm_reparameterisation"))  # type: ignore[arg-type]
    stage = "layernorm_reparameterisation"
    assert not fresh.restore_unit("scale_search", fresh.units[1])
    for unit in fresh.units:
        assert fresh.restore_unit(stage, unit) == bool(unit.norms)
    left, right = work.student.state_dict(), fresh.student.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name].nan_to_num(), right[name].nan_to_num()) for name in left)
    enable(fresh.student, False)
    assert torch.equal(fresh.student(all_images(fresh)), work.student(all_images(work)))
    work.folder.close()


def test_pixels_are_normalised_on_the_way(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, images=pixels(2))
    assert work.image_rows()[slice(0, 2)].dtype == torch.float32
