//! The file of a golden set: safetensors, written whole or not at all, read with suspicion.
//!
//! It owns bytes and tensors. What the metadata means is `metadata.rs`'s; that vectors fit the request
//! and are finite is checked where every result is.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::{Metadata, TensorInfo, TensorView};
use safetensors::{Dtype, serialize};
use serde_json::Value;
use tempfile::NamedTempFile;

use super::{Golden, metadata};
use crate::contract::{Blocks, ForwardOutput, Pooling};
use crate::error::{PrefillError, Result};

/// The key of the metadata that holds everything but the vectors.
const KEY: &str = "golden";

pub(super) fn save(golden: &Golden, path: &Path) -> Result<()> {
    let refused = |error: &dyn std::fmt::Display| {
        refusal(path, format!("a place where a golden file can be written ({error})"))
    };
    let content = to_bytes(golden).map_err(|error| refused(&error))?;
    // What JSON writes and does not read, such as template variables nested too deep, shows here.
    from_bytes(&content).map_err(|wrong| refused(&wrong))?;
    if !is_free(path).map_err(|error| refused(&error))? {
        return Err(refused(&"something else is there; remove it or choose another name"));
    }
    write(path, &content).map_err(|error| refused(&error))
}

/// Whether nothing is lost by writing there: a rename would replace prompts, weights and devices alike.
fn is_free(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(there) => Ok(there.is_file() && from_bytes(&fs::read(path)?).is_ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

pub(super) fn load(path: &Path) -> Result<Golden> {
    let refused =
        |error: io::Error| refusal(path, format!("a golden file that can be read ({error})"));
    // A device or a pipe has no end that could be waited for.
    if !fs::metadata(path).map_err(refused)?.is_file() {
        return Err(refused(io::Error::other("no regular file")));
    }
    let content = fs::read(path).map_err(refused)?;
    from_bytes(&content).map_err(|wrong| refusal(path, format!("a sound golden file ({wrong})")))
}

fn refusal(path: &Path, expected: String) -> PrefillError {
    PrefillError::invalid_request("golden", path.display(), expected)
}

/// Temporary sibling, flush, rename, flush of the folder.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::other("no file name"))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".tmp");
    // As any new file: readable by whom the umask lets, not by its owner alone.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut temporary: NamedTempFile = builder.tempfile_in(folder)?;
    temporary.write_all(content)?;
    temporary.as_file().sync_all()?;
    temporary.persist(path).map_err(|error| error.error)?;
    // Not every system lets a folder be opened; there the rename lasts a little later.
    fs::File::open(folder).and_then(|folder| folder.sync_all()).or(Ok(()))
}

fn to_bytes(golden: &Golden) -> Result<Vec<u8>, safetensors::SafeTensorError> {
    let output = &golden.output;
    let bytes = |block: &[f32]| -> Vec<u8> { block.iter().flat_map(|n| n.to_le_bytes()).collect() };
    let blocks: Vec<(Pooling, Vec<u8>)> = Pooling::ALL
        .iter()
        .filter_map(|&pooling| Some((pooling, bytes(output.block(pooling)?))))
        .collect();
    let tensors = blocks
        .iter()
        .map(|(pooling, bytes)| {
            let view = TensorView::new(Dtype::F32, output.shape().to_vec(), bytes)?;
            Ok((pooling.slug(), view))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    let described = metadata::to_json(golden).to_string();
    serialize(tensors, Some([(KEY.to_owned(), described)].into()))
}

/// The golden set, or what is wrong with it.
fn from_bytes(content: &[u8]) -> Result<Golden, String> {
    let (header, data) = split(content)?;
    let described = header.metadata().as_ref().and_then(|metadata| metadata.get(KEY));
    let described = described.ok_or_else(|| format!("its metadata has no `{KEY}`"))?;
    let described: Value = serde_json::from_str(described)
        .map_err(|error| format!("its metadata `{KEY}` is not JSON: {error}"))?;
    let parts = metadata::from_json(&described)?;

    let shape = [parts.layers.len(), parts.receipts.len(), parts.model.hidden_dim];
    let block = |pooling: Pooling| -> Result<Option<Vec<f32>>, String> {
        header.info(pooling.slug()).map(|info| floats(pooling, info, data, shape)).transpose()
    };
    let blocks = Blocks { last: block(Pooling::Last)?, mean: block(Pooling::Mean)? };
    let model = Arc::new(parts.model);
    let output = ForwardOutput::new(&parts.request, model, parts.layers, blocks, parts.receipts);
    let output = output.map_err(|error| error.to_string())?;
    Golden::new(&parts.request, output).map_err(|error| error.to_string())
}

/// Header and data of a safetensors file. Every offset of the header is within the data.
fn split(content: &[u8]) -> Result<(Metadata, &[u8]), String> {
    let short = || "it is cut short, or not a safetensors file".to_owned();
    let (length, rest) = content.split_first_chunk::<8>().ok_or_else(short)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| short())?;
    let (header, data) = rest.split_at_checked(length).ok_or_else(short)?;
    // Reading the header refuses tensors that overlap, leave a gap or do not fill their offsets.
    let header: Metadata = serde_json::from_slice(header)
        .map_err(|error| format!("its header is not one of safetensors: {error}"))?;
    if header.data_len() != data.len() {
        let (expected, found) = (header.data_len(), data.len());
        return Err(format!("it has {found} bytes of vectors, its header says {expected}"));
    }
    Ok((header, data))
}

fn floats(
    pooling: Pooling,
    info: &TensorInfo,
    data: &[u8],
    shape: [usize; 3],
) -> Result<Vec<f32>, String> {
    let (from, to) = info.data_offsets;
    let bytes = match data.get(from..to) {
        Some(bytes) if info.dtype == Dtype::F32 && info.shape == shape => bytes,
        _ => {
            let found = format!("{} {:?}", info.dtype, info.shape);
            return Err(format!("its tensor `{pooling}` is {found}, not F32 {shape:?}"));
        }
    };
    let (numbers, _) = bytes.as_chunks::<4>();
    Ok(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
