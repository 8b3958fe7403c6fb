//! Static files of the web page.

/// File that the server sends as it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageFile {
    /// Path of the request; `/` is the page itself.
    pub(crate) path: &'static str,
    pub(crate) content_type: &'static str,
    pub(crate) content: &'static [u8],
}

/// All files.
pub(crate) const PAGE_FILES: &[PageFile] = &[];
