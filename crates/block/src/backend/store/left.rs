//! What is left of a store: the devices that can be had, and which of its blocks lie on them.
//!
//! The first device says which others there are. Where it is lost, or nothing on it can be read, the
//! labels of the others tell which part of the store each of them begins with; what a device gained when
//! it was no longer the last one, only the first device tells.

use base::Blame;
use volume::devices::Label;
use volume::rescue::Rescue;
use volume::{Opening, StoreError};

use super::ground::{Ground, Member};
use super::raw::Raw;
use super::{Place, refusal};
use crate::MediumError;
use crate::open::Opener;
use crate::uri::Uri;

/// What is left.
pub(super) struct Left {
    pub(super) ground: Ground,
    pub(super) rescue: Rescue,
    /// What is wrong with devices that could not be had.
    pub(super) missing: Vec<String>,
}

impl Left {
    /// Opens, to read, what can be had of the store on a device, and other devices of it that are named.
    ///
    /// # Errors
    ///
    /// If the device that is named first cannot be had, another one has no label, they are of different
    /// stores, or the store is of a newer version.
    pub(super) fn open(
        opener: &Opener<'_>,
        place: &Place,
        others: &[Uri],
    ) -> Result<Self, MediumError> {
        let device = place.store.clone().to_read();
        let mut ground = Ground::first(&device, opener.open(&device)?)?;
        let pages = ground.shape.pages;
        let raw = Raw::open(opener.regions, &opener.clock, &*ground.medium, &ground.shape);
        let mut raw = raw
            .map_err(|problem| MediumError::new(Blame::Machine, format!("{device}: {problem}")))?;
        let mut opening = Opening::new(pages, 0).to_rescue();
        while let Some(at) = opening.next_read() {
            let mut page = [0; 4096];
            let read = raw.read(at, &mut page);
            opening.handle_read(read.map(|()| &page));
        }
        drop(raw);
        match opening.finish() {
            Ok(opened) => {
                let missing = ground.open_left(opener, place, &opened.store)?;
                let present = ground.join_left(opened.store.devices());
                let rescue = Rescue::new(pages).over(present.into_iter());
                Ok(Self { ground, rescue, missing })
            }
            Err(StoreError::NotFirst(label)) => {
                let first = ground.members.remove(0);
                Self::by_labels(opener, Some((*label, first)), None, others)
            }
            Err(StoreError::NoStore(_)) if !others.is_empty() => {
                let first = ground.members.remove(0);
                Self::by_labels(opener, None, Some(first), others)
            }
            // Who is to be rescued may have anything in the place of superblocks.
            Err(StoreError::NoStore(_)) => {
                Ok(Self { ground, rescue: Rescue::new(pages), missing: Vec::new() })
            }
            Err(error) => Err(refusal(&device.to_string(), &error)),
        }
    }

    /// By what the labels say.
    fn by_labels(
        opener: &Opener<'_>,
        named: Option<(Label, Member)>,
        first: Option<Member>,
        others: &[Uri],
    ) -> Result<Self, MediumError> {
        let mut labelled: Vec<(Label, Member)> = named.into_iter().collect();
        for uri in others {
            let uri = uri.clone().to_read();
            let refuse =
                |problem: String| MediumError::new(Blame::Caller, format!("{uri}: {problem}"));
            let member = Member::of(&uri, opener.open(&uri)?)?;
            let label = Label::decode(&member.first_page(opener)?);
            let label =
                label.map_err(|flaw| refuse(format!("its label cannot be read: {flaw}")))?;
            if let Some((known, _)) =
                labelled.first().filter(|(known, _)| known.store != label.store)
            {
                let (found, expected) = (label.store, known.store);
                let problem =
                    format!("it is of store {found:032x}, expected one of {expected:032x}");
                return Err(refuse(problem));
            }
            if labelled.iter().any(|(known, _)| known.begin == label.begin) {
                let problem = format!("device {} is given twice, expected once", label.number);
                return Err(refuse(problem));
            }
            labelled.push((label, member));
        }
        let first_pages = first.as_ref().map_or(0, |first| first.shape.pages);
        let lost = format!("device 0, {}", labelled.first().map_or("", |(one, _)| &*one.first_uri));
        let missing = match first {
            Some(_) => Vec::new(),
            None => vec![format!("{lost}: not named, and what lies on it is not looked for")],
        };
        let nothing = || MediumError::new(Blame::Caller, "no device is named".to_owned());
        let (ground, present) = Ground::of_labels(labelled, first).ok_or_else(nothing)?;
        let rescue = Rescue::new(first_pages).over(present.into_iter());
        Ok(Self { ground, rescue, missing })
    }
}
