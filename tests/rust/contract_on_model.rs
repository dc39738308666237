//! Requests that a model shows to be impossible, each with its facts. The next valid one works.

use prefill_router::{
    ForwardRequest, Layer, Layers, Message, Pooling, PrefillError, PrefillForward, Prompt, Receipt,
};

use crate::compare::bits;
use crate::fixtures::{case, shared};
use crate::variants::folder;

/// The error of a request, on a forward that gives the same bits for a valid one before and behind it.
fn refused(
    forward: &mut impl PrefillForward,
    valid: &ForwardRequest,
    request: &ForwardRequest,
) -> PrefillError {
    let before = forward.forward(valid).unwrap();
    let error = forward.forward(request).unwrap_err();
    let after = forward.forward(valid).unwrap();
    assert!(bits(&before) == bits(&after), "a valid request differs after {error}");
    error
}

fn invalid(field: &str, value: &str, expected: &str, prompt: Option<usize>) -> PrefillError {
    PrefillError::InvalidRequest {
        field: field.to_owned(),
        value: value.to_owned(),
        expected: expected.to_owned(),
        prompt,
    }
}

fn hello() -> ForwardRequest {
    ForwardRequest::new(["hello"]).unwrap()
}

#[test]
fn a_layer_the_model_lacks_is_refused_with_the_range_there_is() {
    let mut forward = case("llama").forward();
    for (layer, value) in [
        (Layer::Direct(4), "4"),
        (Layer::Direct(usize::MAX), "18446744073709551615"),
        (Layer::FromEnd(5), "-5"),
    ] {
        let layers = Layers::Selected(vec![Layer::Direct(0), layer]);
        let request = hello().to_builder().layers(layers).build().unwrap();
        let error = refused(&mut *forward, &hello(), &request);
        let range = "an index in 0..3 inclusive (or -4..-1), or final";
        assert_eq!(error, invalid("layers", value, range, None));
        assert!(error.to_string().contains("0..3"), "{error}");
    }
}

#[test]
fn an_empty_text_is_refused_where_no_template_gives_it_tokens() {
    let mut forward = case("llama").forward();
    let request = ForwardRequest::new([Prompt::from("hello"), Prompt::Raw(String::new())]);
    let error = refused(&mut *forward, &hello(), &request.unwrap());
    assert_eq!(error, invalid("prompts", "", "at least one token", Some(1)));

    let empty = forward.forward(&ForwardRequest::new([""]).unwrap()).unwrap();
    assert_eq!(empty.receipts(), [Receipt::new(8)]);
}

#[test]
fn a_token_id_beyond_the_table_is_refused_with_its_prompt() {
    let mut forward = shared(&folder("beyond_table"));
    let fits = ForwardRequest::new([Prompt::Tokens(vec![127; 6])]).unwrap();
    let expected = "token ids below 128, the rows of the model's embedding table";
    for (prompt, value) in [
        (Prompt::Tokens(vec![5, 128, 6]), "128"),
        (Prompt::Tokens(vec![u32::MAX]), "4294967295"),
        // The tokenizer knows it, the model does not.
        (Prompt::from("hello <|beyond|> world"), "128"),
    ] {
        let request = ForwardRequest::new([Prompt::from("hello"), prompt]).unwrap();
        let error = refused(&mut *forward, &fits, &request);
        assert_eq!(error, invalid("prompts", value, expected, Some(1)));
    }
}

#[test]
fn a_model_without_a_template_takes_text_and_tokens_only() {
    let folder = folder("no_template");
    let mut forward = shared(&folder);
    let plain = [Prompt::Raw("hello".to_owned()), Prompt::Tokens(vec![40, 41])];
    let valid = ForwardRequest::new(plain.clone()).unwrap();
    let chat = Prompt::from(vec![Message::new("user", "hello")]);
    for prompt in [Prompt::from("hello"), chat] {
        let request = ForwardRequest::new([plain[0].clone(), prompt]).unwrap();
        let error = refused(&mut *forward, &valid, &request);
        let PrefillError::ChatTemplate { model, detail, .. } = &error else { panic!("{error}") };
        assert_eq!(model, folder.to_str().unwrap());
        assert!(detail.contains("no chat template"), "{detail}");
        assert!(error.to_string().contains(folder.file_name().unwrap().to_str().unwrap()));
    }
    let tokens: Vec<_> = forward.forward(&valid).unwrap().receipts().to_vec();
    assert_eq!(tokens, [Receipt::new(5), Receipt::new(2)]);
}

#[test]
fn a_template_that_raises_is_quoted() {
    let folder = folder("strict_roles");
    let mut forward = shared(&folder);
    let turns = |roles: [&str; 2]| roles.map(|role| Message::new(role, "hello")).to_vec();
    let chat = |roles| Prompt::from(turns(roles));
    let valid = ForwardRequest::new([chat(["user", "assistant"])]).unwrap();
    let request = ForwardRequest::new([Prompt::from("hello"), chat(["user", "user"])]).unwrap();
    let error = refused(&mut *forward, &valid, &request);
    let expected = PrefillError::ChatTemplate {
        prompt: Some(1),
        model: folder.to_str().unwrap().to_owned(),
        detail: "roles must alternate".to_owned(),
    };
    assert_eq!(error, expected);
    assert!(error.to_string().contains("refused prompt 1: roles must alternate;"), "{error}");
}

#[test]
fn special_tokens_are_the_templates_own_and_doubled_in_the_reference_profile() {
    let mut forward = shared(&folder("bos_eos"));
    let tokens =
        |request: ForwardRequest| forward.forward(&request).unwrap().receipts()[0].tokens();
    // The template writes BOS and 8 tokens around the text; the tokenizer adds BOS and EOS.
    let counts = [
        ForwardRequest::new(["0123"]),
        ForwardRequest::reference(["0123"]),
        ForwardRequest::builder(["0123"]).add_special_tokens(true).build(),
        ForwardRequest::reference_builder(["0123"]).add_special_tokens(false).build(),
        ForwardRequest::new([Prompt::Raw("0123".to_owned())]),
        ForwardRequest::builder([Prompt::Raw("0123".to_owned())]).add_special_tokens(false).build(),
        ForwardRequest::reference([Prompt::Tokens(vec![40; 4])]),
    ];
    assert_eq!(counts.map(|request| request.unwrap()).map(tokens), [13, 15, 15, 13, 6, 4, 4]);
}

#[test]
fn the_last_token_of_a_prompt_is_the_end_of_the_templates_header() {
    let mut forward = shared(&folder("bos_eos"));
    let embeddings =
        crate::weights::Weights::read(&folder("bos_eos")).rows("model.embed_tokens.weight");
    let layers = [Layer::Direct(0)];
    let request = ForwardRequest::builder(["0123"]).layers(layers).build().unwrap();
    let newline = ForwardRequest::builder([Prompt::Raw("\n".to_owned())])
        .add_special_tokens(false)
        .layers(layers)
        .build()
        .unwrap();
    let last = |output: &prefill_router::ForwardOutput| output.last().unwrap().to_vec();
    let header = last(&forward.forward(&request).unwrap());
    assert_eq!(header, last(&forward.forward(&newline).unwrap()));
    // In the reference profile it is EOS, of id 2, as there.
    let request = ForwardRequest::reference_builder(["0123"])
        .layers(layers)
        .pooling([Pooling::Last])
        .build()
        .unwrap();
    assert_eq!(last(&forward.forward(&request).unwrap()), embeddings[2]);
}
