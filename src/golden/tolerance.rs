//! How far a vector may be from the golden one.
//!
//! It owns the default and the check of a tolerance that is given; what is measured is `compare.rs`'s.

use crate::error::{PrefillError, Result};

/// Between f32 and f32.
const FULL: f64 = 1e-4;
/// Where either side computes in fewer bits.
const HALF: f64 = 5e-2;

/// The tolerance between a golden set and an encoder that compute in these number formats, such as
/// `float32` and `bfloat16`, where none is given: the largest relative L2 distance of a vector.
///
/// It has to allow for another machine and other kernels, which add up the same products in another
/// order, and for nothing else. How far that goes shows in the distance of a forward from one in f64,
/// which two encoders have from each other at most twice: for SmolLM2-135M, all layers, up to 1.8e-6 in
/// f32, 5.0e-3 in f16 and 2.6e-2 in bf16.
///
/// - 1e-4 where both are f32 or wider: room for models that are far deeper.
/// - 5e-2 where either is narrower or unknown. A change of that size goes unseen: pass less where the
///   device is known too.
///
/// On the same machine the bits are the same; pass 0 to insist on them.
///
/// # Examples
///
/// ```
/// use prefill_router::golden::default_tolerance;
///
/// assert_eq!(default_tolerance("float32", "float32"), 1e-4);
/// assert_eq!(default_tolerance("float32", "bfloat16"), 5e-2);
/// ```
pub fn default_tolerance(golden: &str, found: &str) -> f64 {
    let is_full = |dtype| matches!(dtype, "float32" | "float64");
    if is_full(golden) && is_full(found) { FULL } else { HALF }
}

/// Refuses what is no distance, and one that passes any vector: that of zeros is at 1.
pub(crate) fn validated(tolerance: Option<f64>) -> Result<Option<f64>> {
    match tolerance {
        Some(number) if !(0.0..1.0).contains(&number) => {
            let expected = "a relative distance from 0 to less than 1, or none";
            Err(PrefillError::invalid_request("tolerance", number, expected))
        }
        _ => Ok(tolerance),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrower_of_two_formats_decides_and_an_unknown_one_is_narrow() {
        for (golden, found, tolerance) in [
            ("float32", "float32", 1e-4),
            ("float64", "float32", 1e-4),
            ("float32", "bfloat16", 5e-2),
            ("float16", "float32", 5e-2),
            ("bfloat16", "bfloat16", 5e-2),
            ("float32", "float8_e4m3fn", 5e-2),
        ] {
            let given = default_tolerance(golden, found);
            assert!((given - tolerance).abs() < f64::EPSILON, "{golden}, {found}: {given}");
        }
    }

    #[test]
    fn what_is_no_distance_is_refused() {
        for (number, shown) in [
            (f64::NAN, "NaN"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (-1e-9, "-0.000000001"),
            (1.0, "1"),
            (1e9, "1000000000"),
        ] {
            let error = validated(Some(number)).unwrap_err();
            let expected = "a relative distance from 0 to less than 1, or none";
            assert_eq!(error, PrefillError::invalid_request("tolerance", shown, expected));
        }
        for number in [0.0, 1e-4, 1.0_f64.next_down()] {
            assert_eq!(validated(Some(number)), Ok(Some(number)));
        }
        assert_eq!(validated(None), Ok(None));
    }
}
