//! Prompts that are too long (cases 15 and 17). The tiny template is 3 tokens in front of a user's text
//! and 5 behind it, the last 3 of them the header for the answer; a digit is a token.

use std::path::Path;

use prefill_router::{
    ForwardOutput, ForwardRequest, ForwardRequestBuilder, Layer, Overflow, Pooling, PrefillError,
    PrefillForward, Prompt, Receipt, Result,
};

use crate::compare::{assert_close, bits, row};
use crate::fixtures::{case, shared};
use crate::variants::folder;

const HEADER: &str = "<|start|><|assistant|>\n";

fn digits(count: usize) -> String {
    "0123456789".chars().cycle().take(count).collect()
}

fn rendered(count: usize) -> String {
    format!("<|start|><|user|>\n{}<|end|>\n{HEADER}", digits(count))
}

fn at_most_16(prompt: impl Into<Prompt>, overflow: Overflow) -> ForwardRequestBuilder {
    ForwardRequest::builder([prompt.into()])
        .layers(case("llama").layers())
        .max_length(16)
        .overflow(overflow)
}

fn run(folder: &Path, builder: ForwardRequestBuilder) -> Result<ForwardOutput> {
    shared(folder).forward(&builder.build().unwrap())
}

/// Both are the same tokens, so they have the same bits.
fn assert_same_tokens(cut: &ForwardOutput, prompt: Prompt, folder: &Path) {
    let whole = run(folder, at_most_16(prompt, Overflow::Error)).unwrap();
    assert_eq!(whole.receipts(), [Receipt::new(16)]);
    assert!(bits(cut) == bits(&whole));
}

#[test]
fn a_prompt_of_exactly_the_limit_is_untouched() {
    for &overflow in Overflow::ALL {
        let output = run(&case("llama").folder, at_most_16(digits(8), overflow)).unwrap();
        assert_eq!(output.receipts(), [Receipt::new(16)], "{overflow}");
        assert_same_tokens(&output, Prompt::Raw(rendered(8)), &case("llama").folder);
    }
}

#[test]
fn error_names_prompt_tokens_and_limit() {
    for (count, tokens) in [(9, 17), (45, 53)] {
        let error = run(&case("llama").folder, at_most_16(digits(count), Overflow::Error));
        let expected = PrefillError::ContextWindowExceeded { prompt: 0, tokens, limit: Some(16) };
        let error = error.unwrap_err();
        assert_eq!(error, expected);
        let words = format!("prompt 0 has {tokens} tokens, over the limit of 16;");
        assert!(error.to_string().starts_with(&words), "{error}");
    }
}

#[test]
fn keep_template_cuts_the_users_words_and_nothing_of_the_template() {
    // The side on which the tokenizer cuts by itself does not matter.
    for folder in [case("llama").folder.clone(), folder("cuts_left")] {
        for count in [9, 45] {
            let cut = run(&folder, at_most_16(digits(count), Overflow::KeepTemplate)).unwrap();
            let receipt = Receipt::cut(count + 8, 11..count + 3).unwrap();
            assert_eq!(cut.receipts(), [receipt]);
            assert_same_tokens(&cut, Prompt::from(digits(8)), &folder);
        }
    }
}

#[test]
fn right_keeps_the_beginning_and_says_so() {
    for folder in [case("llama").folder.clone(), folder("cuts_left")] {
        for count in [9, 45] {
            let cut = run(&folder, at_most_16(digits(count), Overflow::Right)).unwrap();
            assert_eq!(cut.receipts(), [Receipt::cut(count + 8, 16..count + 8).unwrap()]);
            assert!(cut.receipts()[0].truncated());
            let kept = match count {
                9 => format!("<|start|><|user|>\n{}<|end|>\n<|start|><|assistant|>", digits(9)),
                _ => format!("<|start|><|user|>\n{}", digits(13)),
            };
            assert_same_tokens(&cut, Prompt::Raw(kept), &folder);
        }
    }
}

#[test]
fn a_long_prompt_does_not_change_the_others() {
    let case = case("llama");
    for overflow in [Overflow::KeepTemplate, Overflow::Right] {
        let batch = at_most_16("", overflow).prompts([digits(3), digits(45), digits(8)]);
        let batch = case.forward().forward(&batch.build().unwrap()).unwrap();
        let truncated: Vec<_> = batch.receipts().iter().map(Receipt::truncated).collect();
        assert_eq!(truncated, [false, true, false]);
        for (prompt, count) in [(0, 3), (1, 45), (2, 8)] {
            let alone = run(&case.folder, at_most_16(digits(count), overflow)).unwrap();
            for &pooling in Pooling::ALL {
                for layer in case.layers() {
                    let rows =
                        (row(&batch, pooling, layer, prompt), row(&alone, pooling, layer, 0));
                    assert_close(rows.0, rows.1, &format!("{overflow}, {count} digits"));
                }
            }
        }
    }
}

#[test]
fn the_position_table_of_the_model_is_a_limit() {
    let mut forward = shared(&folder("window_16"));
    assert_eq!(forward.model().unwrap().context_window, Some(16));
    let fits: [Prompt; 2] = [Prompt::Tokens((30..46).collect()), Prompt::from(digits(8))];
    let too_long: [Prompt; 2] = [Prompt::Tokens((30..47).collect()), Prompt::from(digits(9))];
    for (fitting, long) in fits.into_iter().zip(too_long) {
        for builder in [ForwardRequest::builder, ForwardRequest::reference_builder] {
            let both =
                builder(vec![fitting.clone(), long.clone()]).max_length(2048).build().unwrap();
            let error = forward.forward(&both).unwrap_err();
            let limit = Some(16);
            let expected = PrefillError::ContextWindowExceeded { prompt: 1, tokens: 17, limit };
            assert_eq!(error, expected);
            let words = error.to_string();
            assert!(words.contains("17") && words.contains("16"), "{words}");

            let one = builder(vec![fitting.clone()]).max_length(2048).build().unwrap();
            let output = forward.forward(&one).unwrap();
            assert_eq!(output.receipts(), [Receipt::new(16)]);
            assert_eq!(output.layers(), [Layer::Direct(2), Layer::Direct(3)]);
        }
    }
}
