//! Checks of a golden set against toy models of which one thing moved.

use std::sync::Arc;

use super::*;
use crate::contract::{Blocks, Layer, Layers, Message, Pooling, Prompt, Receipt};
use crate::error::PrefillError;
use crate::testing::FakeForward;

type Change = dyn Fn(&ForwardRequest, ForwardOutput) -> Result<ForwardOutput> + Send;

/// The toy model with a fault planted into what it answers.
struct Faulty {
    fake: FakeForward,
    prompts: fn(&Prompt) -> Prompt,
    change: Box<Change>,
}

impl PrefillForward for Faulty {
    fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput> {
        let read =
            request.to_builder().prompts(request.prompts().iter().map(self.prompts)).build()?;
        (self.change)(request, self.fake.forward(&read)?)
    }

    fn model(&mut self) -> Result<Arc<ModelInfo>> {
        self.fake.model()
    }

    fn unload(&mut self) -> Result<()> {
        self.fake.unload()
    }
}

const LAYERS: usize = 4;
const HIDDEN: usize = 8;

fn model() -> FakeForward {
    FakeForward::new(LAYERS, HIDDEN)
}

/// Reads other tokens.
fn with_prompts(prompts: fn(&Prompt) -> Prompt) -> Faulty {
    Faulty { fake: model(), prompts, change: Box::new(|_, output| Ok(output)) }
}

/// Multiplies some rows.
fn with_rows(factor: fn(Pooling, Layer, usize) -> f32) -> Faulty {
    let change = move |request: &ForwardRequest, output: ForwardOutput| {
        let block = |pooling| {
            let rows =
                output.layers().iter().flat_map(|&l| (0..output.prompts()).map(move |p| (l, p)));
            let row = |(layer, prompt)| {
                let row = output.row(pooling, layer, prompt)?.iter();
                Some(row.map(move |number| number * factor(pooling, layer, prompt)))
            };
            output.block(pooling).is_some().then(|| rows.filter_map(row).flatten().collect())
        };
        let blocks = Blocks { last: block(Pooling::Last), mean: block(Pooling::Mean) };
        let (layers, receipts) = (output.layers().to_vec(), output.receipts().to_vec());
        ForwardOutput::new(request, output.model().clone(), layers, blocks, receipts)
    };
    Faulty { fake: model(), prompts: Prompt::clone, change: Box::new(change) }
}

/// Describes itself in another way.
fn with_model(edit: fn(&mut ModelInfo)) -> Faulty {
    let change = move |request: &ForwardRequest, output: ForwardOutput| {
        let mut model = ModelInfo::clone(output.model());
        edit(&mut model);
        let block = |pooling| output.block(pooling).map(<[f32]>::to_vec);
        let blocks = Blocks { last: block(Pooling::Last), mean: block(Pooling::Mean) };
        let (layers, receipts) = (output.layers().to_vec(), output.receipts().to_vec());
        ForwardOutput::new(request, Arc::new(model), layers, blocks, receipts)
    };
    Faulty { fake: model(), prompts: Prompt::clone, change: Box::new(change) }
}

/// A golden set of prompts of every kind, all layers.
fn golden() -> Golden {
    let chat = vec![Message::new("system", "be brief"), Message::new("user", "hello there")];
    let prompts = [
        Prompt::from("route this prompt"),
        Prompt::from(chat),
        Prompt::Raw("one two".to_owned()),
        Prompt::Tokens(vec![7, 5, 3]),
    ];
    let layers = [0, 1, 2, 3].map(Layer::Direct).into_iter().chain([Layer::Final]);
    let request = ForwardRequest::builder(prompts).layers(layers.collect::<Vec<_>>()).build();
    Golden::make(&mut model(), &request.unwrap()).unwrap()
}

fn check(mut forward: impl PrefillForward) -> Report {
    golden().check(&mut forward, None).unwrap()
}

#[test]
fn the_same_model_passes_with_nothing_moved() {
    let report = check(model());
    assert!(report.passed());
    assert_eq!(report.moved(), []);
    let none =
        Distance { relative_l2: 0.0, prompt: 0, layer: Layer::Direct(0), pooling: Pooling::Last };
    assert_eq!(report.worst(), Some(&none));
    assert_eq!(report.into_result(), Ok(()));
}

#[test]
fn layers_are_kept_as_the_model_resolved_them() {
    let request = ForwardRequest::reference(["a b"]).unwrap();
    let golden = Golden::make(&mut model(), &request).unwrap();
    let resolved = Layers::Selected(vec![Layer::Direct(2), Layer::Direct(3)]);
    assert_eq!(golden.request().layers(), &resolved);
    let same = golden.request().to_builder().layers(Layers::UpperHalf).build();
    assert_eq!(same, Ok(request));
}

#[test]
fn any_backend_in_a_box_can_be_checked() {
    let mut boxed: Box<dyn PrefillForward> = Box::new(model());
    assert!(golden().check(&mut *boxed, None).unwrap().passed());
    assert!(golden().check(&mut boxed, 0.0).unwrap().passed());
}

#[test]
fn a_moved_tokenizer_is_named_by_the_prompts_whose_tokens_it_counts_otherwise() {
    let report = check(with_prompts(|prompt| match prompt {
        Prompt::Raw(text) => Prompt::Raw(format!("{text} more")),
        other => other.clone(),
    }));
    let moved = Moved::Tokens { prompt: 2, golden: Receipt::new(2), found: Receipt::new(3) };
    assert_eq!(report.moved(), [moved]);
    assert!(!report.passed());
    // The other prompts show that the model itself is the same.
    assert!(report.worst().unwrap().relative_l2.abs() < f64::EPSILON);
    let error = report.into_result().unwrap_err();
    let words = "expected every golden vector within 1.0e-4, \
                 found prompt 2 has 3 tokens, golden 2: the tokenizer or the chat template moved;";
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn where_every_prompt_has_other_tokens_no_vector_is_judged() {
    let report = check(with_prompts(|_| Prompt::Tokens(vec![1; 9])));
    assert_eq!(report.moved().len(), 4);
    assert!(report.moved().iter().all(|moved| moved.what() == "tokens"));
    assert_eq!(report.worst(), None);
    assert!(report.to_string().starts_with("golden vectors do not hold: none could be compared\n"));
}

#[test]
fn other_tokens_of_the_same_number_show_in_the_embeddings() {
    let report = check(with_prompts(|prompt| match prompt {
        Prompt::Tokens(_) => Prompt::Tokens(vec![7, 5, 4]),
        other => other.clone(),
    }));
    let [Moved::Vectors { after: None, worst, n_layers: 4 }] = report.moved() else {
        panic!("{report}")
    };
    assert_eq!((worst.layer, worst.prompt, worst.pooling), (Layer::Direct(0), 3, Pooling::Last));
    assert!(report.to_string().ends_with(": the tokens or the embeddings moved"), "{report}");
}

#[test]
fn a_moved_layer_is_named_by_the_first_layer_that_differs_not_by_the_worst() {
    let report = check(with_rows(|pooling, layer, prompt| match (pooling, layer, prompt) {
        (Pooling::Mean, Layer::Direct(2), 1) => 1.5,
        (_, Layer::Direct(3) | Layer::Final, _) => 2.0,
        _ => 1.0,
    }));
    let first =
        Distance { relative_l2: 0.5, prompt: 1, layer: Layer::Direct(2), pooling: Pooling::Mean };
    let after = Some(Layer::Direct(1));
    assert_eq!(report.moved(), [Moved::Vectors { after, worst: first, n_layers: 4 }]);
    let worst = report.worst().unwrap();
    assert_eq!((worst.layer, worst.prompt, worst.pooling), (Layer::Direct(3), 0, Pooling::Last));
    assert!((worst.relative_l2 - 1.0).abs() < 1e-12);
    assert_eq!(
        report.to_string(),
        "golden vectors do not hold: worst relative L2 1.0e0 (layer 3, prompt 0, pooling last), tolerance 1.0e-4\n\
         layer 2 is the first that differs, relative L2 5.0e-1 (prompt 1, pooling mean): \
         the weights or the numerics of block 1 moved"
    );
}

#[test]
fn a_tolerance_is_the_last_distance_that_passes() {
    // One number, 200, so that 250 is off by exactly a quarter.
    let mut right = FakeForward::new(4, 1);
    let request = ForwardRequest::builder([Prompt::Tokens(vec![0])]).layers([Layer::Direct(2)]);
    let golden = Golden::make(&mut right, &request.build().unwrap()).unwrap();
    let mut off = Faulty { fake: right, ..with_rows(|_, _, _| 1.25) };
    assert!(golden.check(&mut off, 0.25).unwrap().passed());
    let report = golden.check(&mut off, 0.25_f64.next_down()).unwrap();
    assert!(!report.passed());
    assert_eq!(report.worst().map(|worst| worst.relative_l2), Some(0.25));
}

#[test]
fn a_model_of_another_shape_is_told_without_a_forward() {
    for (fake, expected) in [
        (FakeForward::new(5, HIDDEN), vec![Moved::Layers { golden: 4, found: 5 }]),
        (FakeForward::new(LAYERS, 6), vec![Moved::Width { golden: 8, found: 6 }]),
        (
            FakeForward::new(2, 6).with_context_window(9),
            vec![
                Moved::Layers { golden: 4, found: 2 },
                Moved::Width { golden: 8, found: 6 },
                Moved::Note {
                    fact: "context_window",
                    golden: "none".to_owned(),
                    found: "9".to_owned(),
                },
            ],
        ),
    ] {
        let change = |_: &_, _| panic!("a forward was run");
        let report = check(Faulty { fake, prompts: Prompt::clone, change: Box::new(change) });
        assert_eq!(report.moved(), expected);
        assert!(!report.passed());
        assert_eq!(report.worst(), None);
    }
}

#[test]
fn facts_are_notes_and_the_dtype_sets_the_tolerance() {
    let report = check(with_model(|model| {
        model.revision = Some("abc".to_owned());
        model.dtype = "bfloat16".to_owned();
        model.device = "cuda:0".to_owned();
    }));
    assert!(report.passed());
    assert!((report.tolerance() - 5e-2).abs() < f64::EPSILON);
    let notes: Vec<_> = report.moved().iter().map(ToString::to_string).collect();
    assert_eq!(
        notes,
        [
            "note: revision is `abc`, golden `none`",
            "note: dtype is `bfloat16`, golden `float32`",
            "note: device is `cuda:0`, golden `cpu`",
        ]
    );
    let facts: Vec<_> = report.moved().iter().map(Moved::what).collect();
    assert_eq!(facts, ["revision", "dtype", "device"]);
}

#[test]
fn a_nan_never_passes() {
    let error = golden().check(&mut with_rows(|_, _, _| f32::NAN), None).unwrap_err();
    assert!(error.is_non_finite(), "{error}");
    let error = golden().check(&mut model(), f64::NAN).unwrap_err();
    assert!(error.to_string().starts_with("invalid tolerance `NaN`: "), "{error}");
}

#[test]
fn what_the_forward_says_is_passed_on() {
    let error = golden().check(&mut model().with_context_window(2), None).unwrap_err();
    assert!(error.is_context_window_exceeded(), "{error}");
    let request = ForwardRequest::builder(["a"]).layers([Layer::Direct(9)]).build().unwrap();
    assert!(Golden::make(&mut model(), &request).unwrap_err().is_invalid_request());
}

#[test]
fn an_answer_to_another_request_is_no_result() {
    let change = |request: &ForwardRequest, _| {
        model().forward(&request.to_builder().pooling([Pooling::Mean]).build()?)
    };
    let mut other = Faulty { fake: model(), prompts: Prompt::clone, change: Box::new(change) };
    let error = golden().check(&mut other, None).unwrap_err();
    let layers = "[5, 4, 8] of layers [0, 1, 2, 3, final], ";
    let expected =
        PrefillError::invalid_result(format!("{layers}last and mean"), format!("{layers}mean"));
    assert_eq!(error, expected);
}
