"""Where trained models are kept, and which of them is champion."""
