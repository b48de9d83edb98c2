"""Problems and prompts: what a file may hold, what is refused and in which words, and which ids come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rlvr.data import Problem, load_problems, load_tokenizer, tokenize_problems
from megatron_rlvr.data.prompts import with_instruction
from megatron_rlvr.types import UserError

SHARED_DATA = Path(__file__).resolve().parents[2] / "../shared/data"
GOOD = '{"problem": "1+1", "answer": "2"}\n'


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_problems_come_in_file_order_with_the_line_in_their_id(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + '\n  \n{"answer": "x\\u2028y", "problem": "?", "level": 3}\r\n')
    assert load_problems(path) == [Problem("sums:1", "1+1", "2"), Problem("sums:4", "?", "x\u2028y")]


def test_other_keys_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + b'{"question": "1+1", "solution": "2"}')
    assert load_problems(path, "question", "solution") == [Problem("sums:1", "1+1", "2")]


@pytest.mark.parametrize("number", ["27", "27.0", "-3", "1e3", "0.10", "9" * 5000])
def test_a_number_as_answer_is_taken_as_it_is_written(tmp_path: Path, number: str) -> None:
    path = write(tmp_path, f'{{"problem": "1+1", "answer": {number}}}')
    assert load_problems(path)[0].answer == number


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"problem": "1+1"}', "has no 'answer'"),
        ('{"problem": "1+1", "anwser": "2"}', "has no 'answer', its nearest key is 'anwser'"),
        ('{"prompt": "1+1", "answer": "2"}', "has no 'problem', its nearest key is 'prompt'|its keys are"),
        ('{"x": "1+1", "answer": "2"}', r"has no 'problem', its keys are \['answer', 'x'\]"),
        ('{"problem": "1+1", "answer": ""}', "has 'answer': \"\", not a text or a number"),
        ('{"problem": "1+1", "answer": " \\n"}', "not a text or a number"),
        ('{"problem": "1+1", "answer": null}', "has 'answer': null, not a text or a number"),
        ('{"problem": "1+1", "answer": true}', "has 'answer': true, not a text or a number"),
        ('{"problem": "1+1", "answer": NaN}', "has 'answer': NaN, not a text or a number"),
        ('{"problem": "1+1", "answer": ["2"]}', "not a text or a number"),
        ('{"problem": "", "answer": "2"}', "has 'problem': \"\""),
        ('{"problem": "1+1", "answer": "2"', "is not JSON"),
        ("1+1 = 2", "is not JSON"),
        ('["1+1", "2"]', "is not a JSON object"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_faulty_line_is_named_with_its_remedy(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, GOOD + line + "\n" + GOOD)
    with pytest.raises(UserError, match=words) as error:
        load_problems(path)
    message = str(error.value)
    assert message.startswith(f"{path}:2 ") and "\n" not in message
    assert any(remedy in message for remedy in ("add it", "fill it", "correct or remove", "write it as"))


@pytest.mark.parametrize("content", ["", "\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(UserError, match=r"sums\.jsonl holds no problems; write one"):
        load_problems(write(tmp_path, content))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl cannot be read \(No such file or directory\); name"):
        load_problems(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"holds no \.parquet, \.jsonl, \.json file; put"):
        load_problems(tmp_path)
    with pytest.raises(UserError, match="is not UTF-8"):
        load_problems(write(tmp_path, b'{"problem": "\xff", "answer": "2"}'))


def test_a_prompt_is_the_problem_and_the_suffix(tokenizer_directory: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_directory)
    problems = [Problem("s:1", "what is 1 + 2 ?", "3"), Problem("s:2", "1", "1")]
    prompts = tokenize_problems(
        problems, tokenizer, chat_template=False, suffix=" answer in a box", max_prompt_length=11
    )
    assert prompts[0].token_ids == (1, 5, 6, 7, 10, 8, 12, 13, 14, 15, 16)
    assert prompts[1].token_ids == (1, 7, 13, 14, 15, 16)
    assert (prompts[0].id, prompts[0].answer, prompts[0].text) == ("s:1", "3", "what is 1 + 2 ?")


def test_a_chat_prompt_is_one_user_message_and_the_generation_prompt(tokenizer_directory: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_directory)
    (prompt,) = tokenize_problems(
        [Problem("s:1", "1 + 2", "3")], tokenizer, chat_template=True, suffix=" ?", max_prompt_length=6
    )
    assert prompt.token_ids == (3, 7, 10, 8, 12, 4)


def test_the_boxed_instruction_is_there_once(tokenizer_directory: Path) -> None:
    suffix = "\nPut the answer in \\boxed{}."
    assert with_instruction("1 + 1", suffix) == "1 + 1" + suffix
    assert with_instruction("1 + 1" + suffix, suffix) == "1 + 1" + suffix
    assert with_instruction("Put it within \\boxed{}: 1 + 1", suffix).count("boxed{}") == 1
    assert with_instruction("Put it within \\boxed{}: 1 + 1", " Think.").endswith(" Think.")
    for asks in ("{<final_answer>}", "{ }", "{\\text{Answer}}", "{your final answer}", "{...}", "."):
        assert with_instruction(f"1 + 1 within \\boxed{asks}", suffix).count("boxed") == 1
    for shows in ("{5}", "{x}", " {7}", "5", "{\\boxed{11}\\times 2}", "{\\textbf{T A G}}"):
        assert with_instruction(f"what is \\boxed{shows}", suffix).endswith(suffix)
    problems = [Problem("s:1", "1 + 2 \\boxed{}", "3")]
    (prompt,) = tokenize_problems(
        problems, load_tokenizer(tokenizer_directory), chat_template=False, suffix=suffix, max_prompt_length=6
    )
    assert len(prompt.token_ids) == 5


@pytest.mark.parametrize("chat_template", [True, False])
def test_the_public_tokenizer_gives_the_ids_of_its_own_chat_template(chat_template: bool) -> None:
    directory = SHARED_DATA / "qwen3_tokenizer"
    if not directory.exists():
        pytest.skip("the shared tokenizer is not here")
    tokenizer = load_tokenizer(directory)
    problems = load_problems(SHARED_DATA / "aime24.jsonl")
    suffix = "\nPut the answer in \\boxed{}."
    prompts = tokenize_problems(problems, tokenizer, chat_template=chat_template, suffix=suffix, max_prompt_length=1024)
    for problem, prompt in zip(problems, prompts, strict=True):
        text = problem.text + suffix
        if chat_template:
            text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(prompt.token_ids) == text
        assert list(prompt.token_ids) == tokenizer.encode(text, add_special_tokens=False)


def test_prompts_that_cannot_be_used_are_named(tokenizer_directory: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_directory)
    options = {"chat_template": False, "suffix": "", "max_prompt_length": 4}
    problems = [Problem("s:1", "1 + 2", "3"), Problem("s:2", "1 + 2 + 3", "6")]
    with pytest.raises(UserError, match=r"problem s:2 has 6 tokens, more than data\.max_prompt_length=4; raise"):
        tokenize_problems(problems, tokenizer, **options)
    assert len(tokenize_problems(problems[:1], tokenizer, **options)) == 1
    assert tokenize_problems([], tokenizer, **options) == []
    tokenizer.chat_template = None
    with pytest.raises(
        UserError, match=r"data\.chat_template=true, but the tokenizer .* set data\.chat_template=false"
    ):
        tokenize_problems(problems, tokenizer, **{**options, "chat_template": True})


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path=.*none is not a directory"):
        load_tokenizer(tmp_path / "none")
    for content in (None, "{", "{}"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=r"model\.path=.* has no tokenizer that loads") as error:
            load_tokenizer(tmp_path)
        assert "\n" not in str(error.value)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(UserError, match=r"has no tokenizer files; put the model's tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_all_public_problems_load() -> None:
    files = sorted(SHARED_DATA.glob("*.jsonl"))
    if not files:
        pytest.skip("the shared problem sets are not here")
    for path in files:
        problems = load_problems(path)
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        assert [(p.text, p.answer) for p in problems] == [(row["problem"], row["answer"]) for row in rows]
        assert len({p.id for p in problems}) == len(rows)
