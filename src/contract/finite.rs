//! Finding a NaN or an infinity in a block of vectors.
//!
//! It owns the scan alone. Every number of every output passes through it, so it costs about as much as
//! reading them: whole chunks are judged without a branch, and only a bad one is looked at closely.

/// Numbers judged at once: small enough to be in cache for the second look.
const CHUNK: usize = 4096;
/// The exponent bits of an f32. All set: a NaN or an infinity.
const EXPONENT: u32 = 0x7f80_0000;
/// The lowest exponent bit. Added to a full exponent, it carries into the sign bit.
const CARRY: u32 = 0x0080_0000;

/// Position of the first number that is a NaN or an infinity.
pub(super) fn first_non_finite(numbers: &[f32]) -> Option<usize> {
    let chunk = numbers.chunks(CHUNK).position(|chunk| !all_finite(chunk))?;
    let from = chunk * CHUNK;
    let within = numbers[from..].iter().position(|number| !number.is_finite())?;
    Some(from + within)
}

/// An and, an add and an or per number: the compiler makes vector instructions of it on any target.
fn all_finite(numbers: &[f32]) -> bool {
    let carries = |number: &f32| (number.to_bits() & EXPONENT) + CARRY;
    numbers.iter().fold(0, |seen, number| seen | carries(number)) >> 31 == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_edges_of_finite_are_finite() {
        let edges = [0.0, -0.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, f32::from_bits(1)];
        assert_eq!(first_non_finite(&edges), None);
        assert_eq!(first_non_finite(&[]), None);
    }

    #[test]
    fn every_sort_of_non_finite_is_found_wherever_it_is() {
        let signalling = f32::from_bits(0x7f80_0001);
        for bad in [f32::NAN, -f32::NAN, signalling, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 6] {
                let mut numbers = vec![f32::MAX; 2 * CHUNK + 7];
                numbers[at] = bad;
                assert_eq!(first_non_finite(&numbers), Some(at), "{bad}");
                numbers[2 * CHUNK + 6] = bad;
                assert_eq!(first_non_finite(&numbers), Some(at), "{bad}, the first of two");
            }
        }
    }

    proptest! {
        #[test]
        fn any_bits_are_judged_as_the_standard_library_judges_them(bits: u32) {
            let number = f32::from_bits(bits);
            prop_assert_eq!(all_finite(&[number]), number.is_finite());
        }
    }
}
