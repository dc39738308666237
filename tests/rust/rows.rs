//! Row i is the vector of prompt i, however the prompts are put together (case 6).

use prefill_router::{Batching, ForwardRequest, Pooling, PrefillForward, Prompt};

use crate::compare::{assert_close, row, too_far};
use crate::fixtures::{Case, case};
use crate::variants::{prompts, truth};

const LENGTHS: [usize; 7] = [9, 1, 5, 5, 2, 8, 3];

fn batchings() -> impl Iterator<Item = Batching> {
    let sizes = [1, 2, 3, 7, 100].into_iter();
    let budgets = [1, 2, 8, 9, 12, 20, 33, 2048].into_iter();
    let padded = sizes.map(|batch_size| Batching::Padded { batch_size });
    padded.chain(budgets.map(|max_tokens| Batching::Packed { max_tokens }))
}

fn every_batching_gives_the_rows(case: &Case, builder: fn() -> ForwardRequest) {
    let model = case.name.trim_end_matches("-left");
    for batching in batchings() {
        let request = builder().to_builder().layers(case.layers()).batching(batching);
        let output = case.forward().forward(&request.build().unwrap()).unwrap();
        let shape = [case.n_layers + 1, LENGTHS.len(), case.hidden];
        assert_eq!(output.shape(), shape);
        let tokens: Vec<_> = output.receipts().iter().map(prefill_router::Receipt::used).collect();
        assert_eq!(tokens, LENGTHS);
        for &pooling in Pooling::ALL {
            let difference = too_far(output.block(pooling).unwrap(), &truth(model, pooling), shape);
            assert_eq!(difference, None, "{} {batching:?} {pooling}", case.name);
            for &layer in output.layers() {
                let twins = (row(&output, pooling, layer, 2), row(&output, pooling, layer, 3));
                assert_close(twins.0, twins.1, "the twins");
            }
        }
    }
}

#[test]
fn every_batch_size_and_budget_gives_the_rows_of_the_prompts() {
    // gpt2 counts positions absolutely, qwen3_5 carries a state from token to token.
    for name in ["llama", "gpt2", "qwen3_5"] {
        every_batching_gives_the_rows(case(name), || ForwardRequest::new(prompts()).unwrap());
    }
}

#[test]
fn so_does_the_reference_profile_on_either_side_of_padding() {
    for name in ["llama", "llama-left"] {
        let reference = || ForwardRequest::reference(prompts()).unwrap();
        every_batching_gives_the_rows(case(name), reference);
    }
}

#[test]
fn prompts_in_another_order_give_the_same_rows_in_that_order() {
    let case = case("llama");
    let order = [4, 0, 6, 3, 1, 5, 2];
    let in_order: Vec<Prompt> = order.iter().map(|&at| prompts()[at].clone()).collect();
    for batching in [Batching::Padded { batch_size: 3 }, Batching::Packed { max_tokens: 12 }] {
        let request = ForwardRequest::builder(prompts()).layers(case.layers()).batching(batching);
        let straight = case.forward().forward(&request.clone().build().unwrap()).unwrap();
        let request = request.prompts(in_order.clone());
        let permuted = case.forward().forward(&request.build().unwrap()).unwrap();
        for (now, &before) in order.iter().enumerate() {
            assert_eq!(permuted.receipts()[now], straight.receipts()[before]);
            for &pooling in Pooling::ALL {
                for layer in case.layers() {
                    let rows = (
                        row(&permuted, pooling, layer, now),
                        row(&straight, pooling, layer, before),
                    );
                    assert_close(rows.0, rows.1, &format!("{batching:?}, prompt {before}"));
                }
            }
        }
    }
}
