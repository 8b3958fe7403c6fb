//! Tokens of internal requests, which a wrapper creates itself.
//!
//! A wrapper passes most requests down unchanged, with the caller's token, and inspects completions only
//! while internal requests are in flight. To distinguish the two, the last 2^32 tokens are reserved for
//! internal requests.
//! A caller may use them nevertheless: its request then takes the slow path and is sent under an internal
//! token.

/// The first internal token.
pub(crate) const OWN_FIRST: u64 = 0xffff_ffff_0000_0000;

/// The internal token with index `number`.
#[inline]
pub(crate) const fn internal_token(number: u32) -> u64 {
    OWN_FIRST | number as u64
}

/// The index in an internal token; `None` for other tokens.
#[inline]
pub(crate) const fn index_of_internal_token(token: u64) -> Option<u32> {
    if token < OWN_FIRST {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the number")]
    Some(token as u32)
}

#[cfg(test)]
mod tests {
    use super::{OWN_FIRST, index_of_internal_token, internal_token};

    #[test]
    fn internal_token_round_trips() {
        for number in [0, 1, 1 << 16, u32::MAX] {
            assert_eq!(index_of_internal_token(internal_token(number)), Some(number));
        }
        assert_eq!(index_of_internal_token(OWN_FIRST - 1), None);
        assert_eq!(index_of_internal_token(0), None);
    }
}
