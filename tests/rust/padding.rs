//! Padding never reaches a vector, on whichever side it is (case 1).

use prefill_router::{Batching, ForwardRequest, Layer, Pooling, PrefillForward, Prompt};

use crate::compare::{assert_close, row};
use crate::fixtures::case;
use crate::variants::{rows, truth};
use crate::weights::Weights;

#[test]
fn layer_0_is_the_embeddings_of_the_prompt_and_of_nothing_else() {
    let embeddings = Weights::read(&case("llama").folder).rows("model.embed_tokens.weight");
    // Of 2, 5 and 9 tokens, and where they are among the rows that have a truth.
    let chosen = [4, 2, 0];
    let ids: Vec<Vec<u32>> = chosen.iter().map(|&at| rows()[at].clone()).collect();
    for name in ["llama", "llama-left"] {
        let case = case(name);
        let request = ForwardRequest::reference_builder(ids.iter().cloned().map(Prompt::Tokens))
            .layers(case.layers())
            .batching(Batching::Padded { batch_size: 3 });
        let output = case.forward().forward(&request.build().unwrap()).unwrap();
        for (prompt, ids) in ids.iter().enumerate() {
            let embedded: Vec<&Vec<f32>> =
                ids.iter().map(|&id| &embeddings[usize::try_from(id).unwrap()]).collect();
            let last = row(&output, Pooling::Last, Layer::Direct(0), prompt);
            assert_eq!(last, embedded.last().unwrap().as_slice(), "{name}, prompt {prompt}");
            let mean: Vec<f32> = (0..case.hidden)
                .map(|dim| {
                    #[allow(clippy::cast_precision_loss)] // a handful of tokens
                    let tokens = embedded.len() as f32;
                    embedded.iter().map(|row| row[dim]).sum::<f32>() / tokens
                })
                .collect();
            assert_close(row(&output, Pooling::Mean, Layer::Direct(0), prompt), &mean, name);
        }
        for &pooling in Pooling::ALL {
            let truth = truth("llama", pooling);
            for (at, &layer) in case.layers().iter().enumerate() {
                for (prompt, among) in chosen.iter().enumerate() {
                    let from = (at * rows().len() + among) * case.hidden;
                    let expected = &truth[from..from + case.hidden];
                    let what = format!("{name}: {pooling} of layer {layer}, prompt {prompt}");
                    assert_close(row(&output, pooling, layer, prompt), expected, &what);
                }
            }
        }
    }
}

#[test]
fn a_pad_or_eos_id_inside_a_prompt_counts() {
    let case = case("llama");
    let embeddings = Weights::read(&case.folder).rows("model.embed_tokens.weight");
    // 0 is the pad token, 2 the one that ends a text.
    let ids = [Prompt::Tokens(vec![40, 0, 2, 50, 0]), Prompt::Tokens(vec![60; 9])];
    for builder in [ForwardRequest::builder(ids.clone()), ForwardRequest::reference_builder(ids)] {
        let request = builder.layers([Layer::Direct(0)]).build().unwrap();
        let output = case.forward().forward(&request).unwrap();
        assert_eq!(output.receipts()[0].used(), 5);
        let last = row(&output, Pooling::Last, Layer::Direct(0), 0);
        assert_eq!(last, embeddings[0].as_slice());
        let tokens = [40, 0, 2, 50, 0].map(|id: usize| &embeddings[id]);
        let mean: Vec<f32> = (0..case.hidden)
            .map(|dim| tokens.iter().map(|row| row[dim]).sum::<f32>() / 5.0)
            .collect();
        assert_close(row(&output, Pooling::Mean, Layer::Direct(0), 0), &mean, "the mean");
    }
}
