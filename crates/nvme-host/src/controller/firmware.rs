//! Firmware image download in parts (Base 2.1 §5.1.9).

use tenmil_base::Segment;
use tenmil_wire::admin::{FirmwareImageDownload, numd_of_bytes};
use tenmil_wire::{Command, TypedCommand};

use super::admin_pointers::TRANSFER_BYTES_MAX;
use super::identity::ControllerLimits;
use crate::error::RequestError;

/// Iterator over the Firmware Image Download commands for an image. Each command is passed to
/// [`submit_admin`](super::Controller::submit_admin) with its part of the image.
#[derive(Clone, Debug)]
pub struct FirmwareDownloadCommands {
    image: Segment,
    sent_bytes: u32,
    chunk_bytes: u32,
}

impl FirmwareDownloadCommands {
    /// Creates the commands that download `image` to a controller with these limits.
    pub fn new(image: Segment, limits: &ControllerLimits) -> Result<Self, RequestError> {
        if image.len_bytes == 0 || !image.len_bytes.is_multiple_of(4) {
            let (what, found) = ("the firmware image's length", image.len_bytes.into());
            return Err(RequestError::OutOfRange {
                what,
                found,
                min: 4,
                max: u64::from(u32::MAX) & !3,
            });
        }
        let most = limits.transfer_bytes_max.unwrap_or(u64::MAX);
        let most = u32::try_from(most).unwrap_or(u32::MAX).min(TRANSFER_BYTES_MAX);
        let unit = limits.firmware_unit_bytes;
        // A unit above the maximum transfer is contradictory and is ignored.
        let chunk_bytes = if unit > most { most } else { most - most % unit };
        Ok(Self { image, sent_bytes: 0, chunk_bytes })
    }
}

impl Iterator for FirmwareDownloadCommands {
    type Item = (Command, Segment);

    fn next(&mut self) -> Option<(Command, Segment)> {
        let len_bytes = self.chunk_bytes.min(self.image.len_bytes - self.sent_bytes);
        if len_bytes == 0 {
            return None;
        }
        let piece = self.image.slice(self.sent_bytes, len_bytes)?;
        let command =
            FirmwareImageDownload { numd: numd_of_bytes(len_bytes), ofst: self.sent_bytes / 4 };
        self.sent_bytes += len_bytes;
        Some((command.to_command(), piece))
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{RegionId, Segment};
    use tenmil_wire::identify::IdentifyController;

    use super::FirmwareDownloadCommands;
    use crate::controller::identity::Identity;

    fn chunks(len_bytes: u32, mdts: u8, fwug: u8) -> Vec<(u32, u32, Segment)> {
        let page =
            IdentifyController::zeroed().with(|id| id.sqes(0x66).cqes(0x44).mdts(mdts).fwug(fwug));
        let image = Segment { region: RegionId(1), offset: 4096, len_bytes };
        let chunks = FirmwareDownloadCommands::new(
            image,
            &Identity::from_identify(page, false).unwrap().limits,
        )
        .unwrap();
        chunks.map(|(command, data)| (command.cdw10(), command.cdw11(), data)).collect()
    }

    #[test]
    fn firmware_chunks_cover_the_image_without_gap_or_overlap() {
        for len_bytes in [4, 4096, 131_072, 131_076, 1_000_000] {
            for (mdts, fwug) in [(5, 1), (5, 3), (0, 0xff), (2, 0), (1, 200)] {
                let mut end = 0;
                for (numd, dwords, data) in chunks(len_bytes, mdts, fwug) {
                    assert_eq!(dwords * 4, end);
                    assert_eq!(data.offset, 4096 + u64::from(end));
                    assert_eq!((numd + 1) * 4, data.len_bytes);
                    end += data.len_bytes;
                }
                assert_eq!(end, len_bytes, "MDTS {mdts}, FWUG {fwug}");
            }
        }
    }

    #[test]
    fn firmware_chunks_respect_mdts_and_fwug() {
        let pieces = chunks(1_000_000, 5, 3);
        assert!(pieces.iter().all(|(.., data)| data.len_bytes <= 131_072));
        let (last, others) = pieces.split_last().unwrap();
        assert!(others.iter().all(|(.., data)| data.len_bytes == 10 * 12_288));
        assert!(last.2.len_bytes < 131_072);
    }

    #[test]
    fn image_with_unaligned_length_is_rejected() {
        let limits = Identity::from_identify(
            IdentifyController::zeroed().with(|id| id.sqes(0x66).cqes(0x44)),
            false,
        );
        let limits = limits.unwrap().limits;
        for len_bytes in [0, 1, 4097] {
            let image = Segment { region: RegionId(1), offset: 0, len_bytes };
            assert!(FirmwareDownloadCommands::new(image, &limits).is_err());
        }
    }
}
