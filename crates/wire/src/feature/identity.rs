//! Features for the host's identity and its reservations.

use crate::layout::layout;

layout! {
    /// 80h: Software Progress Marker (Base 2.1 §5.1.25.1.27).
    pub struct SoftwareProgressMarker(u32) {
        /// Pre-boot Software Load Count.
        pbslc @ 0..=7: u8;
    }

    /// 81h: Host Identifier (Base 2.1 §5.1.25.1.28).
    pub struct HostIdentifier(u32) {
        /// Enable Extended Host Identifier: 16 bytes instead of 8.
        exhid @ 0: bool;
    }

    /// Data structure of 81h with EXHID clear (Base 2.1 §5.1.25.1.28).
    #[derive(Copy)]
    pub struct HostIdentifierPage[8] {
        /// Host Identifier; 0 for none.
        hostid @ 0: u64;
    }

    /// Data structure of 81h with EXHID set (Base 2.1 §5.1.25.1.28).
    #[derive(Copy)]
    pub struct HostIdentifierExtendedPage[16] {
        /// Host Identifier; zeros for none.
        hostid @ 0: [u8; 16];
    }

    /// 82h: Reservation Notification Mask (Base 2.1 §5.1.25.1.29).
    pub struct ReservationNotificationMask(u32) {
        /// Mask Registration Preempted Notification.
        regpre @ 1: bool;
        /// Mask Reservation Released Notification.
        resrel @ 2: bool;
        /// Mask Reservation Preempted Notification.
        respre @ 3: bool;
    }

    /// 83h: Reservation Persistence (Base 2.1 §5.1.25.1.30).
    pub struct ReservationPersistence(u32) {
        /// Persist Through Power Loss.
        ptpl @ 0: bool;
    }

    /// Header of 7Dh, 7Eh and 7Fh: host metadata (Base 2.1 §5.1.25.1.26).
    pub struct HostMetadata[4096] {
        /// Number of Metadata Element Descriptors.
        count @ 0: u8;
        /// Metadata Element Descriptors.
        elements @ 2: [u8; 4094];
    }
}

impl HostMetadata {
    /// Elements: type, revision and value. Iteration ends at one that extends past the page.
    pub fn iter(&self) -> impl Iterator<Item = (u8, u8, &[u8])> + '_ {
        let mut rest = &self.as_bytes()[2..];
        let next = move || {
            let (header, behind) = rest.split_first_chunk::<4>()?;
            let length = usize::from(u16::from_le_bytes([header[2], header[3]]));
            let value = behind.get(..length)?;
            rest = &behind[length..];
            Some((header[0] & 0x3f, header[1] & 0xf, value))
        };
        core::iter::from_fn(next).take(self.count().into())
    }
}

#[cfg(test)]
mod tests {
    use super::HostMetadata;

    #[test]
    fn host_metadata_elements_are_bounded_by_count_and_page() {
        let mut bytes = [0; 4096];
        bytes[..12].copy_from_slice(&[2, 0, 1, 0, 2, 0, b'o', b'k', 2, 0, 0, 0x20]);
        let metadata = HostMetadata::from_bytes(&bytes);
        assert_eq!(metadata.iter().collect::<Vec<_>>(), [(1, 0, &b"ok"[..])]);
        bytes[11] = 0;
        assert_eq!(HostMetadata::from_bytes(&bytes).iter().count(), 2);
    }
}
