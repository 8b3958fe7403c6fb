//! CNS 03h: namespace identification descriptors (Base 2.1 §5.1.13.2.3).
//!
//! ```text
//!  byte 0     type (NIDT)
//!  byte 1     length (NIDL)
//!  byte 4..   the identifier
//! ```
//!
//! The list is terminated by a length of 0.

use super::CommandSet;

/// Length of the header of each identifier (Base 2.1 §5.1.13.2.3).
const HEADER_BYTES: usize = 4;

/// Identifier of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceIdentifier {
    /// NIDT 1h: IEEE Extended Unique Identifier.
    Eui64([u8; 8]),
    /// NIDT 2h: Namespace Globally Unique Identifier.
    Nguid([u8; 16]),
    /// NIDT 3h: Namespace UUID.
    Uuid([u8; 16]),
    /// NIDT 4h: Command Set Identifier.
    Csi(CommandSet),
}

impl NamespaceIdentifier {
    /// NIDT: the type.
    #[must_use]
    pub const fn nidt(&self) -> u8 {
        match self {
            Self::Eui64(_) => 1,
            Self::Nguid(_) => 2,
            Self::Uuid(_) => 3,
            Self::Csi(_) => 4,
        }
    }

    /// Appends the descriptor to `bytes`.
    pub fn emit(&self, bytes: &mut Vec<u8>) {
        let csi;
        let nid: &[u8] = match self {
            Self::Eui64(nid) => nid,
            Self::Nguid(nid) | Self::Uuid(nid) => nid,
            Self::Csi(set) => {
                csi = [set.code()];
                &csi
            }
        };
        let nidl = u8::try_from(nid.len()).unwrap_or(0);
        bytes.extend([self.nidt(), nidl, 0, 0]);
        bytes.extend(nid);
    }

    fn parse(nidt: u8, nid: &[u8]) -> Option<Self> {
        Some(match nidt {
            1 => Self::Eui64(nid.try_into().ok()?),
            2 => Self::Nguid(nid.try_into().ok()?),
            3 => Self::Uuid(nid.try_into().ok()?),
            4 => match nid {
                [code] => Self::Csi(CommandSet::from_code(*code)),
                _ => return None,
            },
            _ => return None,
        })
    }
}

/// Identifiers in a descriptor list. Skips those of unknown type or wrong length.
pub fn namespace_identifiers(page: &[u8]) -> impl Iterator<Item = NamespaceIdentifier> + '_ {
    let mut rest = page;
    core::iter::from_fn(move || {
        let (header, behind) = rest.split_first_chunk::<HEADER_BYTES>()?;
        let length = usize::from(header[1]);
        let nid = behind.get(..length).filter(|nid| !nid.is_empty())?;
        rest = &behind[length..];
        Some(NamespaceIdentifier::parse(header[0], nid))
    })
    .flatten()
}

/// Builds a list of these identifiers, as many as fit.
#[must_use]
pub fn build_descriptor_list(identifiers: &[NamespaceIdentifier]) -> [u8; super::BYTES] {
    let mut bytes = Vec::new();
    identifiers.iter().for_each(|identifier| identifier.emit(&mut bytes));
    let mut page = [0; super::BYTES];
    let length = bytes.len().min(page.len());
    page[..length].copy_from_slice(&bytes[..length]);
    page
}

#[cfg(test)]
mod tests {
    use super::{NamespaceIdentifier, build_descriptor_list, namespace_identifiers};
    use crate::identify::CommandSet;

    #[test]
    fn descriptor_list_round_trips() {
        let identifiers = [
            NamespaceIdentifier::Eui64([1, 2, 3, 4, 5, 6, 7, 8]),
            NamespaceIdentifier::Nguid([9; 16]),
            NamespaceIdentifier::Uuid([7; 16]),
            NamespaceIdentifier::Csi(CommandSet::Zoned),
        ];
        let page = build_descriptor_list(&identifiers);
        assert_eq!(page[..6], [1, 8, 0, 0, 1, 2]);
        assert_eq!(page[12..16], [2, 16, 0, 0]);
        assert_eq!(page[52..57], [4, 1, 0, 0, 2]);
        assert_eq!(namespace_identifiers(&page).collect::<Vec<_>>(), identifiers);
    }

    #[test]
    fn unknown_or_mis_sized_descriptors_are_skipped() {
        let mut page = vec![9, 2, 0, 0, 0xaa, 0xbb];
        page.extend([1, 3, 0, 0, 1, 2, 3]);
        NamespaceIdentifier::Csi(CommandSet::Nvm).emit(&mut page);
        let found: Vec<_> = namespace_identifiers(&page).collect();
        assert_eq!(found, [NamespaceIdentifier::Csi(CommandSet::Nvm)]);
    }

    #[test]
    fn descriptor_beyond_the_page_ends_the_list() {
        assert_eq!(namespace_identifiers(&[3, 16, 0, 0, 1, 2, 3]).count(), 0);
        assert_eq!(namespace_identifiers(&[3, 16, 0]).count(), 0);
        assert_eq!(namespace_identifiers(&[]).count(), 0);
    }
}
