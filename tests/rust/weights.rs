//! Reading and changing the weights of a tiny model: float32 in one safetensors file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::fixtures::size;

/// Every tensor of a model, by its name.
pub struct Weights {
    tensors: BTreeMap<String, Tensor>,
}

struct Tensor {
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Where a folder keeps its weights.
pub fn file(folder: &Path) -> PathBuf {
    folder.join("model.safetensors")
}

impl Weights {
    pub fn read(folder: &Path) -> Self {
        let content = fs::read(file(folder)).unwrap();
        let (length, rest) = content.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
        let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
        let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
        let tensor = |(name, tensor): (String, Value)| {
            assert_eq!(tensor["dtype"], "F32", "{name}");
            let sizes = |key: &str| -> Vec<usize> {
                tensor[key].as_array().unwrap().iter().map(|item| size(item).unwrap()).collect()
            };
            let [from, to] = sizes("data_offsets")[..] else { panic!("{name} has no two offsets") };
            (name, Tensor { shape: sizes("shape"), bytes: data[from..to].to_vec() })
        };
        Self { tensors: tensors.map(tensor).collect() }
    }

    /// Writes them into the folder, over those it has.
    pub fn write(&self, folder: &Path) {
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        let mut data = Vec::new();
        for (name, Tensor { shape, bytes }) in &self.tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            let tensor = json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
            header.insert(name.clone(), tensor);
            data.extend_from_slice(bytes);
        }
        let header = Value::from(header).to_string();
        let mut content = (header.len() as u64).to_le_bytes().to_vec();
        content.extend_from_slice(header.as_bytes());
        content.extend_from_slice(&data);
        fs::write(file(folder), content).unwrap();
    }

    /// The rows of a matrix, or a vector as its only row.
    pub fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        let Tensor { shape, bytes } = &self.tensors[name];
        let (numbers, _) = bytes.as_chunks::<4>();
        let numbers: Vec<f32> = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        numbers.chunks(*shape.last().unwrap()).map(<[f32]>::to_vec).collect()
    }

    /// Changes every number of a tensor.
    pub fn edit(&mut self, name: &str, edit: impl Fn(f32) -> f32) {
        let (numbers, _) = self.tensors.get_mut(name).unwrap().bytes.as_chunks_mut::<4>();
        for number in numbers {
            *number = edit(f32::from_le_bytes(*number)).to_le_bytes();
        }
    }

    /// Takes a tensor out.
    pub fn remove(&mut self, name: &str) {
        self.tensors.remove(name).unwrap();
    }

    /// Takes the last row off a matrix.
    pub fn shorten(&mut self, name: &str) {
        let Tensor { shape, bytes } = self.tensors.get_mut(name).unwrap();
        let [rows, columns] = shape[..] else { panic!("{name} is no matrix") };
        bytes.truncate((rows - 1) * columns * 4);
        shape[0] = rows - 1;
    }
}
