//! 0Ch: Asymmetric Namespace Access: state of each group on this controller (Base 2.1
//! §5.1.12.1.13).
//!
//! A header, then one descriptor per group, each followed by its namespaces.

use crate::field_type::{FieldType, code};
use crate::layout::{Layout, layout};

layout! {
    /// The header of 0Ch (Base 2.1 §5.1.12.1.13).
    pub struct AnaHeader[16] {
        /// Change Count.
        chgcnt @ 0: u64;
        /// Number of ANA Group Descriptors.
        ngrps @ 8: u16;
    }

    /// Descriptor of a group, followed by its namespaces (Base 2.1 §5.1.12.1.13).
    #[derive(Copy)]
    pub struct AnaGroup[32] {
        /// ANA Group ID.
        grpid @ 0: u32;
        /// Number of NSID Values.
        nnsids @ 4: u32;
        /// Change Count.
        chgcnt @ 8: u64;
        /// State byte.
        state_byte @ 16: u8 {
            /// Asymmetric Namespace Access State.
            state @ 0..=3: AnaState;
        };
    }
}

code! {
    /// Asymmetric namespace access state (Base 2.1 §8.1.1).
    pub enum AnaState {
        /// Optimized.
        Optimized = 0x1,
        /// Non-optimized.
        NonOptimized = 0x2,
        /// Inaccessible.
        Inaccessible = 0x3,
        /// Persistent loss.
        PersistentLoss = 0x4,
        /// Change.
        Change = 0xf,
    }
}

/// Groups of a page with their namespaces, limited by the bytes available.
///
/// Iteration ends at a group whose namespaces do not all fit.
pub fn parse_ana_groups(page: &[u8]) -> impl Iterator<Item = (AnaGroup, GroupNamespaces<'_>)> + '_ {
    let count = AnaHeader::parse(page).map_or(0, |header| header.ngrps());
    let mut rest = page.get(AnaHeader::BYTES..).unwrap_or(&[]);
    let next = move || {
        let (group, behind) = rest.split_first_chunk::<32>()?;
        let group = AnaGroup::from_bytes(group);
        let length = usize::try_from(group.nnsids()).ok()?.checked_mul(4)?;
        let namespaces = behind.get(..length)?;
        rest = &behind[length..];
        Some((group, GroupNamespaces { bytes: namespaces }))
    };
    core::iter::from_fn(next).take(count.into())
}

/// The namespaces of a group.
#[derive(Clone, Debug)]
pub struct GroupNamespaces<'a> {
    bytes: &'a [u8],
}

impl Iterator for GroupNamespaces<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let (nsid, rest) = self.bytes.split_first_chunk::<4>()?;
        self.bytes = rest;
        Some(u32::load(nsid))
    }
}

/// Appends a group with its namespaces to a page.
///
/// Sets NNSIDS to the number of namespaces; the caller sets NGRPS in the header.
pub fn append_ana_group(group: AnaGroup, namespaces: &[u32], page: &mut Vec<u8>) {
    let nnsids = u32::try_from(namespaces.len()).unwrap_or(u32::MAX);
    page.extend(group.with(|group| group.nnsids(nnsids)).as_bytes());
    page.extend(namespaces.iter().flat_map(|nsid| nsid.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::{AnaGroup, AnaHeader, AnaState, append_ana_group, parse_ana_groups};

    fn sample_ana_page(ngrps: u16) -> Vec<u8> {
        let mut page = AnaHeader::zeroed().with(|it| it.ngrps(ngrps)).as_bytes().to_vec();
        let group = |grpid, state| AnaGroup::zeroed().with(|it| it.grpid(grpid).state(state));
        append_ana_group(group(1, AnaState::Optimized), &[1, 5], &mut page);
        append_ana_group(group(2, AnaState::Inaccessible), &[], &mut page);
        append_ana_group(group(3, AnaState::Change), &[9], &mut page);
        page
    }

    fn parse_sample(page: &[u8]) -> Vec<(u32, AnaState, Vec<u32>)> {
        let whole = |(group, nsids): (AnaGroup, super::GroupNamespaces<'_>)| {
            (group.grpid(), group.state(), nsids.collect())
        };
        parse_ana_groups(page).map(whole).collect()
    }

    #[test]
    fn ana_groups_round_trip() {
        let expected = [
            (1, AnaState::Optimized, vec![1, 5]),
            (2, AnaState::Inaccessible, vec![]),
            (3, AnaState::Change, vec![9]),
        ];
        assert_eq!(parse_sample(&sample_ana_page(3)), expected);
        assert_eq!(parse_sample(&sample_ana_page(2)), expected[..2]);
        assert_eq!(parse_sample(&sample_ana_page(u16::MAX)), expected);
    }

    #[test]
    fn ana_group_beyond_the_page_ends_the_list() {
        let whole = sample_ana_page(3);
        for length in 0..whole.len() {
            let complete = [56, 88, 124].iter().filter(|&&end| end <= length).count();
            assert_eq!(parse_sample(&whole[..length]).len(), complete, "{length} bytes");
        }
    }
}
