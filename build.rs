//! Build-time facts for the embedded backend: pyo3's cfgs, where libpython is, which interpreter was linked, and the
//! table of the engine's Python sources.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "transformers")]
    embedded::configure();
}

#[cfg(feature = "transformers")]
mod embedded {
    use std::fmt::Write as _;
    use std::path::{Path, PathBuf};
    use std::{env, fs};

    const ENGINE: &str = "python/prefill_router/engine";

    pub fn configure() {
        pyo3_build_config::use_pyo3_cfgs();
        pyo3_build_config::add_libpython_rpath_link_args();
        if let Some(interpreter) = pyo3_build_config::get().executable() {
            println!("cargo:rustc-env=PREFILL_ROUTER_BUILD_PYTHON={interpreter}");
        }
        let root = PathBuf::from(
            env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"),
        );
        let engine = root.join(ENGINE);
        println!("cargo:rerun-if-changed={}", engine.display());
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        fs::write(out.join("engine_sources.rs"), table(&engine)).expect("OUT_DIR is writable");
    }

    /// A Rust expression: `&[(module name below the package, is a package, source text), ...]`, sorted.
    fn table(engine: &Path) -> String {
        let mut files = Vec::new();
        collect(engine, &mut files);
        files.sort();
        let mut text = String::from("&[\n");
        for file in files {
            let relative = file.strip_prefix(engine).expect("collected below the engine");
            let parts: Vec<_> = relative
                .with_extension("")
                .iter()
                .map(|part| part.to_string_lossy().into_owned())
                .collect();
            let (package, parts) = match parts.split_last() {
                Some((last, parents)) if last == "__init__" => (true, parents),
                _ => (false, parts.as_slice()),
            };
            let name = parts.join(".");
            let path = file.to_str().expect("the checkout has a path of valid Unicode");
            writeln!(text, "    ({name:?}, {package}, include_str!({path:?})),")
                .expect("a String takes it");
        }
        text + "]\n"
    }

    fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
        let entries =
            fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for path in entries.map(|entry| entry.expect("a readable folder entry").path()) {
            if path.is_dir() && path.file_name().is_some_and(|name| name != "__pycache__") {
                collect(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "py") {
                files.push(path);
            }
        }
    }
}
