//! Tokens of requests that a wrapper has made itself.
//!
//! A wrapper hands most requests down as they are, with the token of whoever made them, and looks at
//! the answers only while requests of its own are under way. So that the two can be told apart, the
//! last 2^32 tokens are kept for the wrappers' own. A caller may use them all the same: its request
//! then takes the long way, as one that the wrapper makes anew.

/// The first token that is a wrapper's own.
pub(crate) const OWN_FIRST: u64 = 0xffff_ffff_0000_0000;

/// The own token of `number`.
#[inline]
pub(crate) const fn own_token(number: u32) -> u64 {
    OWN_FIRST | number as u64
}

/// The number of an own token.
#[inline]
pub(crate) const fn own_number(token: u64) -> Option<u32> {
    if token < OWN_FIRST {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the number")]
    Some(token as u32)
}

#[cfg(test)]
mod tests {
    use super::{OWN_FIRST, own_number, own_token};

    #[test]
    fn a_number_comes_back_out_of_its_token_and_out_of_no_other() {
        for number in [0, 1, 1 << 16, u32::MAX] {
            assert_eq!(own_number(own_token(number)), Some(number));
        }
        assert_eq!(own_number(OWN_FIRST - 1), None);
        assert_eq!(own_number(0), None);
    }
}
