//! 0Dh: Persistent Event Log (Base 2.1 §5.1.12.1.14).
//!
//! A header, then events of variable length, each with a header of its own.

use crate::layout::{Ascii, Layout, layout};

layout! {
    /// The header of 0Dh, Persistent Event Log (Base 2.1 §5.1.12.1.14).
    pub struct PersistentEvents[512] {
        /// Log Page Identifier.
        lid @ 0: u8;
        /// Total Number of Events.
        tnev @ 4: u32;
        /// Total Log Length, in bytes, header and events.
        tll @ 8: u64;
        /// Log Revision.
        rv @ 16: u8;
        /// Log Header Length: bytes after this field.
        lhl @ 18: u16;
        /// Timestamp.
        timestamp @ 20: u64;
        /// Power on Hours.
        poh @ 28: u128;
        /// Power Cycle Count.
        pcc @ 44: u64;
        /// PCI Vendor ID.
        vid @ 52: u16;
        /// PCI Subsystem Vendor ID.
        ssvid @ 54: u16;
        /// Serial Number.
        sn @ 56: Ascii<20>;
        /// Model Number.
        mn @ 76: Ascii<40>;
        /// NVM Subsystem NVMe Qualified Name.
        subnqn @ 116: Ascii<256>;
        /// Generation Number.
        gn @ 372: u16;
        /// Reporting Context Information.
        rci @ 374: u32 {
            /// Reporting Context Port Identifier.
            rcpid @ 0..=15: u16;
            /// Reporting Context Port Identifier Type.
            rcpit @ 16..=17: u8;
            /// Reporting Context Exists.
            rce @ 18: bool;
        };
        /// Supported Events Bitmap.
        seb @ 480: [u8; 32];
    }

    /// An event's header (Base 2.1 §5.1.12.1.14).
    pub struct PersistentEvent[24] {
        /// Event Type.
        etype @ 0: u8;
        /// Event Type Revision.
        etype_revision @ 1: u8;
        /// Event Header Length: bytes after the first three.
        ehl @ 2: u8;
        /// Event Header Additional Information.
        ehai @ 3: u8 {
            /// Port Identifier Type.
            pit @ 0..=1: u8;
        };
        /// Controller Identifier.
        cntlid @ 4: u16;
        /// Event Timestamp.
        timestamp @ 6: u64;
        /// Port Identifier.
        pelpid @ 14: u16;
        /// Vendor Specific Information Length.
        vsil @ 20: u16;
        /// Event Length: vendor specific information and event data.
        el @ 22: u16;
    }
}

/// Events after the header, each with its data.
///
/// Iteration ends at an event that extends past the available bytes.
pub fn parse_persistent_events(page: &[u8]) -> impl Iterator<Item = (PersistentEvent, &[u8])> + '_ {
    let mut rest = page.get(PersistentEvents::BYTES..).unwrap_or(&[]);
    core::iter::from_fn(move || {
        let event = PersistentEvent::parse(rest).ok()?;
        let header = (usize::from(event.ehl()) + 3).max(PersistentEvent::BYTES);
        let end = header + usize::from(event.el());
        let body = rest.get(header..end)?;
        rest = &rest[end..];
        Some((event, body))
    })
}

#[cfg(test)]
mod tests {
    use super::{PersistentEvent, parse_persistent_events};

    #[test]
    fn persistent_events_are_chained_by_length() {
        let event = |etype, el| {
            *PersistentEvent::zeroed().with(|it| it.etype(etype).ehl(21).el(el)).as_bytes()
        };
        let mut page = vec![0; 512];
        page.extend(event(1, 2));
        page.extend([0xaa, 0xbb]);
        page.extend(event(4, 0));
        page.extend(event(2, 5));
        page.extend([0xcc; 4]);
        let found: Vec<_> =
            parse_persistent_events(&page).map(|(event, body)| (event.etype(), body)).collect();
        assert_eq!(found, [(1, &[0xaa, 0xbb][..]), (4, &[][..])]);
        assert_eq!(parse_persistent_events(&page[..500]).count(), 0);
    }
}
