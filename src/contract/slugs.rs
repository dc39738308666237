//! Stable names for small enums: the words that logs, Python and the command line use.
//!
//! It owns how a name is given, shown and read back; which names there are is the enum's business.

/// Gives an enum `ALL`, `slug`, `Display` and `FromStr` from one table of its variants.
macro_rules! slugs {
    ($type:ident, $field:literal, $($variant:ident = $slug:literal),+ $(,)?) => {
        impl $type {
            /// Every value, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The stable name, the same in Rust and in Python.
            pub const fn slug(self) -> &'static str {
                match self {
                    $(Self::$variant => $slug),+
                }
            }
        }

        impl ::std::fmt::Display for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.slug())
            }
        }

        impl ::std::str::FromStr for $type {
            type Err = $crate::error::PrefillError;

            /// Reads a slug back.
            ///
            /// # Errors
            ///
            /// `invalid_request` for any other word, with the words there are.
            fn from_str(word: &str) -> $crate::error::Result<Self> {
                match word {
                    $($slug => Ok(Self::$variant),)+
                    _ => {
                        let words: &[&str] = &[$($slug),+];
                        let expected = format!("one of {}", words.join(", "));
                        Err($crate::error::PrefillError::invalid_request($field, word, expected))
                    }
                }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use std::fmt::{Debug, Display};
    use std::str::FromStr;

    use crate::contract::{Layout, Overflow, Pooling, Profile};
    use crate::error::PrefillError;

    fn leads_back<T>(all: &[T], slugs: &[&str])
    where
        T: Display + Debug + PartialEq + FromStr<Err = PrefillError>,
    {
        let shown: Vec<_> = all.iter().map(ToString::to_string).collect();
        assert_eq!(shown, slugs);
        for (value, slug) in all.iter().zip(slugs) {
            assert_eq!(slug.parse::<T>().as_ref(), Ok(value));
            let error = slug.to_uppercase().parse::<T>().unwrap_err();
            assert!(error.is_invalid_request());
            let expected = format!("expected one of {}", slugs.join(", "));
            assert!(error.to_string().ends_with(&expected), "{error}");
        }
    }

    #[test]
    fn every_slug_leads_back_to_its_value() {
        leads_back(Pooling::ALL, &["last", "mean"]);
        leads_back(Overflow::ALL, &["error", "keep_template", "right"]);
        leads_back(Layout::ALL, &["packed", "padded", "single"]);
        leads_back(Profile::ALL, &["default", "reference"]);
    }

    #[test]
    fn a_slug_can_be_padded_in_a_table() {
        assert_eq!(format!("{:>6}|", Pooling::Last), "  last|");
    }
}
